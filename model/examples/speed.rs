//! Tokens per second of one shard that holds a whole model, without text, sampling beyond the largest logit, or network.
//!
//! `cargo run --release -p shoal-model --example speed -- MODEL.gguf [THREADS [PROMPT [TOKENS [f16|q8]]]]`

use std::sync::Arc;
use std::time::Instant;

use shoal_model::{
    DecoderConfig, KvType, MAX_RUN_TOKENS, ModelFile, Op, Rank, Request, Sampling, Shard, ShardSpec, Step,
    Want,
};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("name a GGUF file")?;
    let mut number = |default: u32| arguments.next().map_or(Ok(default), |text| text.parse());
    let (threads, prompt, tokens) = (number(1)?, number(512)?, number(128)?);
    let kv_type: KvType = arguments.next().map_or(Ok(KvType::F16), |text| text.parse())?;

    let file = ModelFile::open(path.as_ref())?;
    let config = DecoderConfig::from_gguf(&file)?;
    let spec = ShardSpec {
        layers: 0..config.layers,
        rank: Rank::only(),
        context: (prompt + tokens).min(config.max_context),
        slots: 1,
        kv_type,
        threads: threads as usize,
    };
    let start = Instant::now();
    let mut shard = Shard::load(&file, &spec, &mut |_| {})?;
    drop(file);
    println!("loaded in {:.2} s", start.elapsed().as_secs_f64());

    let ids: Vec<u32> = (0..prompt).map(|i| (i * 7919 + 13) % config.vocab).collect();
    let request = Arc::new(Request {
        id: 1,
        prompt: ids.clone(),
        sampling: Sampling::GREEDY,
        logprobs: None,
        max_tokens: tokens,
        stop: Vec::new(),
        ignore_eos: true,
        trace: false,
    });
    let mut ops = vec![Op::Admit { slot: 0, request }];
    let mut step = 0;
    let mut pos = 0;
    let mut token = 0;
    let mut run = |ops: Vec<Op>| -> Outcome<Option<u32>> {
        step += 1;
        let sampled = shard.execute(&Step { number: step, ops }, &[], &mut Vec::new())?;
        Ok(sampled.first().and_then(|sampled| sampled.outcome.as_ref().ok()).map(|token| token.id))
    };

    let start = Instant::now();
    for chunk in ids.chunks(MAX_RUN_TOKENS) {
        let end = pos + chunk.len() as u32;
        let want = if end == prompt { Want::Sample } else { Want::Nothing };
        ops.push(Op::Run { slot: 0, pos, tokens: chunk.to_vec(), want });
        token = run(std::mem::take(&mut ops))?.unwrap_or(token);
        pos = end;
    }
    let prefill = start.elapsed().as_secs_f64();
    println!("prefill {prompt}: {:.1} tokens/s", f64::from(prompt) / prefill);

    let start = Instant::now();
    for _ in 1..tokens {
        let ops = vec![Op::Run { slot: 0, pos, tokens: vec![token], want: Want::Sample }];
        token = run(ops)?.ok_or("nothing was sampled")?;
        pos += 1;
    }
    let decode = start.elapsed().as_secs_f64();
    println!("decode {}: {:.1} tokens/s", tokens - 1, f64::from(tokens - 1) / decode);
    Ok(())
}
