//! The sampler against the definitions written out in another way: f64, whole sorts, no buffers.

use super::*;

const BASE: Sampling = Sampling {
    temperature: 1.0,
    top_p: 1.0,
    top_k: 0,
    min_p: 0.0,
    typical_p: 1.0,
    repetition_penalty: 1.0,
    presence_penalty: 0.0,
    frequency_penalty: 0.0,
    logit_bias: Vec::new(),
    seed: 0,
};

fn choose(logits: &[f32], sampling: &Sampling, position: u64, history: &[u32]) -> Result<u32, SampleError> {
    let mut sampler = Sampler::new(logits.len() as u32);
    sampler.choose(logits, sampling, None, position, history).map(|(token, _)| token)
}

/// Logits without a pattern, some of them equal.
fn noise(count: usize, seed: u64) -> Vec<f32> {
    (0..count).map(|i| ((philox::unit(seed, i as u64, 0) * 40.0).round() * 0.25) as f32 - 5.0).collect()
}

/// The probabilities after all parameters but the seed: the definitions, step by step.
fn defined(logits: &[f32], sampling: &Sampling, prompt: &[u32], answer: &[u32]) -> Vec<f64> {
    let mut logits: Vec<f64> = logits.iter().map(|&logit| logit.into()).collect();
    for &(token, bias) in &sampling.logit_bias {
        logits[token as usize] += f64::from(bias);
    }
    for (token, logit) in logits.iter_mut().enumerate() {
        let times = answer.iter().filter(|&&seen| seen as usize == token).count();
        if times > 0 || prompt.iter().any(|&seen| seen as usize == token) {
            let penalty = f64::from(sampling.repetition_penalty);
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
        *logit -= times as f64 * f64::from(sampling.frequency_penalty);
        if times > 0 {
            *logit -= f64::from(sampling.presence_penalty);
        }
    }
    let normed = |weights: &[f64]| -> Vec<f64> {
        let total: f64 = weights.iter().sum();
        weights.iter().map(|weight| weight / total).collect()
    };
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> =
        logits.iter().map(|logit| ((logit - most) / f64::from(sampling.temperature)).exp()).collect();
    let mut p = normed(&weights);
    let ranked = |p: &[f64]| -> Vec<usize> {
        let mut ids: Vec<usize> = (0..p.len()).filter(|&id| p[id] > 0.0).collect();
        ids.sort_by(|&a, &b| p[b].total_cmp(&p[a]).then(a.cmp(&b)));
        ids
    };
    let keep = |p: &[f64], kept: &[usize]| -> Vec<f64> {
        normed(&(0..p.len()).map(|id| if kept.contains(&id) { p[id] } else { 0.0 }).collect::<Vec<_>>())
    };
    let fewest = |p: &[f64], order: &[usize], mass: f32| -> usize {
        let mut sum = 0.0;
        // As far as sums in another order can tell.
        order
            .iter()
            .position(|&id| {
                sum += p[id];
                sum >= f64::from(mass) - 1e-12
            })
            .map_or(order.len(), |last| last + 1)
    };
    if sampling.top_k > 0 {
        let order = ranked(&p);
        p = keep(&p, &order[..order.len().min(sampling.top_k as usize)]);
    }
    if sampling.top_p < 1.0 {
        let order = ranked(&p);
        p = keep(&p, &order[..fewest(&p, &order, sampling.top_p)]);
    }
    if sampling.min_p > 0.0 {
        let most = p.iter().copied().fold(0.0, f64::max);
        let kept: Vec<usize> =
            (0..p.len()).filter(|&id| p[id] >= f64::from(sampling.min_p) * most * (1.0 - 1e-12)).collect();
        p = keep(&p, &kept);
    }
    if sampling.typical_p < 1.0 {
        let entropy: f64 = p.iter().filter(|&&p| p > 0.0).map(|p| -p * p.ln()).sum();
        let mut order = ranked(&p);
        // Equal distances stay in the order of rank; rounding may not tell equals apart.
        let distance = |id: usize| ((-p[id].ln() - entropy).abs() * 1e9).round();
        order.sort_by(|&a, &b| distance(a).total_cmp(&distance(b)));
        p = keep(&p, &order[..fewest(&p, &order, sampling.typical_p)]);
    }
    p
}

/// The token that a draw from `p` gives, and how near the random numbers came to another: first the block of 32 tokens (the
/// vocabularies here have less than 64 of them) at which the sum passes one number, then the token at which the sum within
/// the block passes the block's own.
fn drawn(p: &[f64], seed: u64, position: u64) -> (u32, f64) {
    let walk = |p: &[f64], unit: f64| {
        let total: f64 = p.iter().sum();
        let mut sum = 0.0;
        let mut nearest = f64::INFINITY;
        let mut chosen = None;
        for (id, p) in p.iter().enumerate() {
            sum += p / total;
            nearest = nearest.min((sum - unit).abs());
            if chosen.is_none() && sum > unit && *p > 0.0 {
                chosen = Some(id);
            }
        }
        (chosen.unwrap_or(0), nearest)
    };
    let sums: Vec<f64> = p.chunks(32).map(|block| block.iter().sum()).collect();
    let (block, near) = walk(&sums, philox::unit(seed, position, 0));
    let start = block * 32;
    let end = p.len().min(start + 32);
    let (token, nearer) = walk(&p[start..end], philox::unit(seed, position, block as u32 + 1));
    ((start + token) as u32, near.min(nearer))
}

#[test]
fn every_parameter_alone_and_together_is_as_defined() {
    let mut cases = vec![BASE];
    for value in [0.01f32, 0.3, 0.9, 0.999] {
        cases.push(Sampling { top_p: value, ..BASE });
        cases.push(Sampling { min_p: value, ..BASE });
        cases.push(Sampling { typical_p: value, ..BASE });
        cases.push(Sampling { temperature: value, ..BASE });
    }
    cases.push(Sampling { top_k: 7, ..BASE });
    cases.push(Sampling { repetition_penalty: 1.3, ..BASE });
    cases.push(Sampling { repetition_penalty: 0.7, ..BASE });
    cases.push(Sampling { presence_penalty: 2.0, ..BASE });
    cases.push(Sampling { frequency_penalty: -1.5, ..BASE });
    cases.push(Sampling { logit_bias: vec![(3, 100.0), (5, 99.0), (9, -100.0)], ..BASE });
    cases.push(Sampling {
        temperature: 0.7,
        top_k: 60,
        top_p: 0.95,
        min_p: 0.02,
        typical_p: 0.9,
        repetition_penalty: 1.1,
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        logit_bias: vec![(0, 1.0), (17, -2.0)],
        seed: 9,
    });
    let history: Vec<u32> = (0..40).map(|i| (i * i * 7 + 3) % 90).collect();
    let mut compared = 0;
    for (index, sampling) in cases.iter().enumerate() {
        for round in 0..60u64 {
            let logits = noise(100 + (round as usize % 3) * 50, round * 31 + index as u64);
            let position = round % 20;
            let prompt = history.len() - position as usize;
            let sampling = Sampling { seed: round, ..sampling.clone() };
            let p = defined(&logits, &sampling, &history[..prompt], &history[prompt..]);
            let token = choose(&logits, &sampling, position, &history).unwrap();
            assert!(p[token as usize] > 0.0, "{sampling:?}: {token} was to be left out");
            let (expected, nearest) = drawn(&p, round, position);
            if nearest > 1e-6 {
                assert_eq!(token, expected, "{sampling:?}");
                compared += 1;
            }
        }
    }
    assert!(compared > cases.len() * 50, "too few draws were clear: {compared}");
}

#[test]
fn a_reused_sampler_is_as_good_as_a_new_one() {
    let mut sampler = Sampler::new(200);
    let parameters = [
        Sampling { repetition_penalty: 1.4, frequency_penalty: 0.3, ..BASE },
        Sampling { top_p: 0.5, ..BASE },
        Sampling::GREEDY,
        Sampling { typical_p: 0.4, logit_bias: vec![(7, 5.0)], ..BASE },
        BASE,
    ];
    for round in 0..200u64 {
        let logits = noise(200, round);
        let sampling = Sampling { seed: round, ..parameters[round as usize % 5].clone() };
        let history: Vec<u32> = (0..round as u32 % 50 + 5).map(|i| (i * 13) % 200).collect();
        let reused = sampler.choose(&logits, &sampling, Some(3), round % 5, &history).unwrap();
        let fresh = Sampler::new(200).choose(&logits, &sampling, Some(3), round % 5, &history).unwrap();
        assert_eq!(reused, fresh, "{sampling:?}");
    }
}

#[test]
fn greedy_takes_the_lowest_id_among_equals() {
    assert_eq!(choose(&[1.0, 3.0, 3.0, 2.0], &Sampling::GREEDY, 0, &[]), Ok(1));
    assert_eq!(choose(&[0.0, -0.0], &Sampling::GREEDY, 0, &[]), Ok(0));
    assert_eq!(choose(&[-5.0], &Sampling::GREEDY, 9, &[]), Ok(0));
    let mut logits = vec![-1.0; 100];
    for largest in [99, 96, 50, 16, 15, 0] {
        logits[largest] = 2.0;
        assert_eq!(choose(&logits, &Sampling::GREEDY, 0, &[]), Ok(largest as u32));
    }
}

#[test]
fn penalties_and_biases_reach_greedy_answers() {
    let greedy = |sampling: Sampling, history: &[u32], position| {
        choose(&[1.0, 2.0, 1.9, -1.0], &sampling, position, history).unwrap()
    };
    assert_eq!(greedy(Sampling { repetition_penalty: 2.5, ..Sampling::GREEDY }, &[1], 0), 2);
    // The prompt is not the answer.
    assert_eq!(greedy(Sampling { presence_penalty: 2.0, ..Sampling::GREEDY }, &[1], 0), 1);
    assert_eq!(greedy(Sampling { presence_penalty: 2.0, ..Sampling::GREEDY }, &[3, 1], 1), 2);
    assert_eq!(greedy(Sampling { frequency_penalty: 0.06, ..Sampling::GREEDY }, &[3, 1], 1), 1);
    assert_eq!(greedy(Sampling { frequency_penalty: 0.06, ..Sampling::GREEDY }, &[3, 1, 1], 2), 2);
    let banned = vec![(1, -100.0), (2, -100.0)];
    assert_eq!(greedy(Sampling { logit_bias: banned, ..Sampling::GREEDY }, &[], 0), 0);
    assert_eq!(greedy(Sampling { logit_bias: vec![(3, 100.0)], ..Sampling::GREEDY }, &[], 0), 3);
}

#[test]
fn a_logit_that_is_no_finite_number_is_named() {
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for length in [3, 40] {
            for sampling in [Sampling::GREEDY, BASE, Sampling { top_k: 1, top_p: 0.5, ..BASE }] {
                let mut logits = vec![1.0; length];
                logits[2] = value;
                let result = choose(&logits, &sampling, 0, &[]);
                assert!(
                    matches!(result, Err(SampleError::NotFinite { token: 2, .. })),
                    "{value}: {result:?}"
                );
            }
        }
    }
    assert_eq!(choose(&[], &Sampling::GREEDY, 0, &[]), Err(SampleError::Empty));
}

#[test]
fn parameters_out_of_range_are_refused() {
    let refused = |sampling: Sampling, name: &str| {
        let error = sampling.check(100).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
    };
    for value in [-0.5, f32::NAN, f32::INFINITY] {
        refused(Sampling { temperature: value, ..BASE }, "temperature");
    }
    for value in [-0.1, 1.1, f32::NAN] {
        refused(Sampling { top_p: value, ..BASE }, "top_p");
        refused(Sampling { min_p: value, ..BASE }, "min_p");
        refused(Sampling { typical_p: value, ..BASE }, "typical_p");
    }
    for value in [0.0, -1.0, 10.5, f32::NAN] {
        refused(Sampling { repetition_penalty: value, ..BASE }, "repetition_penalty");
    }
    for value in [-2.5, 2.1, f32::NAN] {
        refused(Sampling { presence_penalty: value, ..BASE }, "presence_penalty");
        refused(Sampling { frequency_penalty: value, ..BASE }, "frequency_penalty");
    }
    for bias in [(1, 100.5), (1, f32::NAN), (100, 1.0)] {
        refused(Sampling { logit_bias: vec![bias], ..BASE }, "logit_bias");
    }
    refused(Sampling { logit_bias: vec![(1, 1.0), (2, 0.0), (1, 2.0)], ..BASE }, "token 1 twice");
    refused(Sampling { logit_bias: vec![(1, 1.0); MAX_BIASES + 1], ..BASE }, "1025 tokens");
    let bounds = Sampling {
        temperature: f32::MAX,
        top_p: 0.0,
        top_k: u32::MAX,
        min_p: 1.0,
        typical_p: 0.0,
        repetition_penalty: 10.0,
        presence_penalty: -2.0,
        frequency_penalty: 2.0,
        logit_bias: (0..100).map(|token| (token, 100.0)).collect(),
        seed: u64::MAX,
    };
    bounds.check(100).unwrap();
    // The tightest cuts leave one token.
    let token = choose(&noise(100, 4), &bounds, 3, &[1, 2, 3, 4, 5]).unwrap();
    assert!(token < 100);
}

/// Chi-squared over 20,000 draws with a fixed seed. 9 degrees of freedom: 27.9 is the 0.999 quantile.
#[test]
fn draws_follow_the_softmax() {
    let logits: Vec<f32> = (0..10).map(|i| (i as f32 * 0.7).sin() * 2.0).collect();
    for (temperature, seed) in [(1.0, 1), (0.5, 2), (2.0, u64::MAX)] {
        let p = defined(&logits, &Sampling { temperature, ..BASE }, &[], &[]);
        let n = 20_000;
        let counts = counts(&logits, &Sampling { temperature, seed, ..BASE }, n);
        let chi_squared: f64 = counts
            .iter()
            .zip(&p)
            .map(|(&count, p)| (count as f64 - p * n as f64).powi(2) / (p * n as f64))
            .sum();
        assert!(chi_squared < 27.9, "temperature {temperature}: {chi_squared}, {counts:?}");
    }
}

/// How often each of `logits` is drawn over `n` positions.
fn counts(logits: &[f32], sampling: &Sampling, n: u64) -> Vec<u64> {
    let mut counts = vec![0; logits.len()];
    let mut sampler = Sampler::new(logits.len() as u32);
    for position in 0..n {
        counts[sampler.choose(logits, sampling, None, position, &[]).unwrap().0 as usize] += 1;
    }
    counts
}

#[test]
fn a_draw_depends_on_seed_and_position_only() {
    let logits: Vec<f32> = (0..1000).map(|i| (i % 17) as f32 * 0.1).collect();
    let sampling = Sampling { seed: 42, ..BASE };
    let draws = |sampling: &Sampling, history: &[u32], order: &mut dyn Iterator<Item = u64>| -> Vec<u32> {
        order.map(|i| choose(&logits, sampling, i, history).unwrap()).collect()
    };
    let forward = draws(&sampling, &[], &mut (0..50));
    let mut backward = draws(&sampling, &[7; 9], &mut (0..50).rev());
    backward.reverse();
    assert_eq!(forward, backward);
    assert_ne!(forward, draws(&Sampling { seed: 43, ..BASE }, &[], &mut (0..50)));
}

/// A change of these would change every seeded answer; it needs a line in the change log.
#[test]
fn seeded_draws_stay_what_they_are() {
    let logits: Vec<f32> = (0..100).map(|i| ((i * 37) % 100) as f32 * 0.05).collect();
    let sampling = Sampling { temperature: 0.8, top_k: 40, top_p: 0.9, seed: 7, ..BASE };
    let drawn: Vec<u32> = (0..8).map(|i| choose(&logits, &sampling, i, &[]).unwrap()).collect();
    assert_eq!(drawn, SEEDED);
}
const SEEDED: [u32; 8] = [81, 62, 8, 40, 5, 48, 78, 8];

#[test]
fn a_cut_that_cuts_nothing_changes_nothing() {
    let logits: Vec<f32> = (0..500).map(|i| ((i * 7919) % 500) as f32 * 0.01).collect();
    let base = Sampling { seed: 11, ..BASE };
    for position in 0..200 {
        let all = choose(&logits, &base, position, &[]);
        for same in [
            Sampling { top_k: 500, ..base.clone() },
            Sampling { top_k: u32::MAX, ..base.clone() },
            Sampling { top_p: 0.999_999_9, ..base.clone() },
            Sampling { min_p: 1e-9, ..base.clone() },
            Sampling { typical_p: 0.999_999_9, ..base.clone() },
        ] {
            assert_eq!(all, choose(&logits, &same, position, &[]), "{same:?}");
        }
    }
}

/// A flat distribution needs more tokens than the first guess.
#[test]
fn mass_over_equals_keeps_the_lowest_ids() {
    for sampling in [Sampling { top_p: 0.5, seed: 5, ..BASE }, Sampling { typical_p: 0.5, seed: 5, ..BASE }] {
        let counted = counts(&[0.25; 2_000], &sampling, 20_000);
        assert!(counted[1_000..].iter().all(|&n| n == 0), "{sampling:?}");
        assert!(counted[900..1_000].iter().any(|&n| n > 0), "{sampling:?}");
    }
}

#[test]
fn extreme_temperatures_are_defined() {
    let logits = [f32::MIN, 1.0, 2.0, f32::MAX];
    let coldest = Sampling { temperature: f32::MIN_POSITIVE, seed: 1, ..BASE };
    assert_eq!(counts(&logits, &coldest, 50), [0, 0, 0, 50]);
    let typical = Sampling { typical_p: 0.9, ..coldest };
    assert_eq!(counts(&logits, &typical, 50), [0, 0, 0, 50]);
    let hottest = Sampling { temperature: f32::MAX, seed: 1, ..BASE };
    let counted = counts(&[0.0, 1.0, 2.0], &hottest, 3_000);
    assert!(counted.iter().all(|&n| n > 850), "{counted:?}");
}

#[test]
fn logprobs_are_of_the_raw_logits() {
    let logits = noise(300, 77);
    let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
    let of = |id: u32| (f64::from(logits[id as usize]).exp() / total).ln();
    let sampling = Sampling { logit_bias: vec![(3, 100.0)], temperature: 0.3, top_k: 1, ..BASE };
    for count in [0, 1, 5, MAX_LOGPROBS] {
        let (token, logprobs) = Sampler::new(300).choose(&logits, &sampling, Some(count), 0, &[]).unwrap();
        let logprobs = logprobs.unwrap();
        assert_eq!((token, logprobs.top.len()), (3, usize::from(count)));
        assert!((f64::from(logprobs.chosen) - of(3)).abs() < 1e-5);
        let mut order: Vec<u32> = (0..300).collect();
        order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
        for ((id, logprob), expected) in logprobs.top.iter().zip(order) {
            assert_eq!(*id, expected);
            assert!((f64::from(*logprob) - of(expected)).abs() < 1e-5);
        }
    }
    assert_eq!(Sampler::new(300).choose(&logits, &sampling, None, 0, &[]).unwrap().1, None);
    let (_, few) = Sampler::new(2).choose(&[0.0, 0.0], &BASE, Some(20), 0, &[]).unwrap();
    assert_eq!(few.unwrap().top, [(0, -std::f32::consts::LN_2), (1, -std::f32::consts::LN_2)]);
}

/// Whoever holds which part of the vocabulary, the token is that of one who holds all.
#[test]
fn a_vocabulary_in_parts_gives_the_same_tokens() {
    let cases = [
        Sampling { temperature: 0.0, ..BASE },
        BASE,
        Sampling { temperature: 0.3, ..BASE },
        Sampling { top_k: 1, ..BASE },
        Sampling { top_k: 40, top_p: 0.9, min_p: 0.05, typical_p: 0.8, ..BASE },
        Sampling { top_k: 64, ..BASE },
        Sampling { top_k: 65, ..BASE },
        Sampling { top_p: 0.8, ..BASE },
        Sampling { min_p: 0.1, ..BASE },
        Sampling { typical_p: 0.6, ..BASE },
        Sampling {
            repetition_penalty: 1.4,
            presence_penalty: 0.7,
            frequency_penalty: -0.4,
            logit_bias: vec![(0, 4.0), (299, -7.0), (130, 50.0)],
            ..BASE
        },
    ];
    let history: Vec<u32> = (0..60).map(|i| (i * i * 7 + 3) % 290).collect();
    let cuts: [&[usize]; 5] =
        [&[0, 300], &[0, 160, 300], &[0, 32, 300], &[0, 96, 192, 300], &[0, 64, 128, 256, 288, 300]];
    for (index, sampling) in cases.iter().enumerate() {
        for round in 0..80u64 {
            let mut logits = noise(300, round * 17 + index as u64);
            if round == 79 {
                logits[170] = f32::INFINITY;
            }
            let sampling = Sampling { seed: round, ..sampling.clone() };
            let position = round % 25;
            let expected = choose(&logits, &sampling, position, &history);
            for cuts in cuts {
                for row in [false, true] {
                    let found = choose_in_parts(&logits, cuts, row, &sampling, position, &history);
                    assert_eq!(found, expected, "{sampling:?} {cuts:?} {row}");
                }
            }
        }
    }
}

/// Each part reports, and one chooses.
fn choose_in_parts(
    logits: &[f32],
    cuts: &[usize],
    row: bool,
    sampling: &Sampling,
    position: u64,
    history: &[u32],
) -> Result<u32, SampleError> {
    let vocab = logits.len();
    let need = Need::of(sampling, vocab, row);
    let place = Place { sampling, position, history };
    let reports: Vec<_> = cuts
        .windows(2)
        .map(|cut| {
            let (tokens, mut report) = (cut[0]..cut[1], Vec::new());
            let part = &logits[tokens.clone()];
            Sampler::new(vocab as u32).report(need, part, tokens.clone(), place, &mut report);
            assert_eq!(report.len(), need.bytes(&tokens, 32));
            (tokens, report)
        })
        .collect();
    let reports: Vec<_> = reports.iter().map(|(tokens, report)| (tokens.clone(), &report[..])).collect();
    Sampler::new(vocab as u32).decide(need, &reports, place)
}
