//! Whole swarms on a paused clock. Seconds printed are virtual.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use self::swarm::{Swarm, desired, instance, node, placed};
use super::{Change, NotObeyed, ProposeError, Role, StartError, Store, StoreError};
use crate::{Command, GroupId, Outcome, Refusal, Token};

mod swarm;

#[tokio::test(start_paused = true)]
async fn a_node_alone_leads_at_once_and_finds_its_state_again() {
    let mut swarm = Swarm::of("a_node_alone", 1).await;
    let view = swarm.one_group("leads", &[0]).await;
    assert_eq!((view.role, view.number), (Role::Scheduler, 0));
    swarm.desire(0, 1).await;
    assert!(swarm.view(0).state.instances.contains_key(&instance(1)), "the view shows what was proposed");
    let again = swarm.propose(0, Command::Desire(desired(1))).await.unwrap();
    assert_eq!(again.outcome, Outcome::Unchanged);
    let refused = swarm.propose(0, Command::Stop(instance(9))).await;
    assert_eq!(refused, Err(ProposeError::Refused(Refusal::UnknownInstance(instance(9)))));

    swarm.kill(0).await;
    swarm.start(0).await;
    let restarted = swarm.one_group("leads again", &[0]).await;
    assert_eq!(restarted.group, view.group);
    assert!(restarted.state.instances.contains_key(&instance(1)));
}

#[tokio::test(start_paused = true)]
async fn a_long_log_becomes_a_snapshot_and_is_found_again() {
    let mut swarm = Swarm::of("a_long_log", 2).await;
    swarm.one_group("two", &[0, 1]).await;
    for n in 0..700 {
        swarm.propose((n % 2) as usize, Command::OpenWindow { until_unix_ms: n }).await.unwrap();
    }
    let before = swarm.one_group("written", &[0, 1]).await;
    for n in [0, 1] {
        swarm.kill(n).await;
    }
    for n in [0, 1] {
        swarm.start(n).await;
    }
    let after = swarm.one_group("two again", &[0, 1]).await;
    assert_eq!(after.state.open_until, Some(699));
    assert_eq!(after.group, before.group);
}

/// Nodes meet all at once, one after the other, and as pairs that find each other late.
#[tokio::test(start_paused = true)]
async fn nodes_become_one_group_in_several_start_orders() {
    for nodes in [2, 3, 5, 7] {
        let all: Vec<usize> = (0..nodes).collect();

        let swarm = Swarm::of("start_orders", nodes).await;
        swarm.one_group(&format!("{nodes} at once"), &all).await;

        let mut swarm = Swarm::new("start_orders");
        for n in all.iter().rev() {
            swarm.start(*n).await;
            let so_far: Vec<usize> = (*n..nodes).collect();
            swarm.one_group(&format!("{} one after the other", so_far.len()), &so_far).await;
        }

        let mut swarm = Swarm::new("start_orders");
        for n in &all {
            swarm.start(*n).await;
            let pause = swarm.random(2000);
            sleep(Duration::from_millis(pause)).await;
        }
        swarm.one_group(&format!("{nodes} within seconds"), &all).await;

        let mut swarm = Swarm::new("start_orders");
        let (low, high) = all.split_at(nodes / 2);
        swarm.cut(low, high);
        for n in &all {
            swarm.start(*n).await;
        }
        for (number, side) in [low, high].into_iter().enumerate() {
            swarm.one_group("a part", side).await;
            swarm.desire(side[0], number as u32).await;
        }
        swarm.heal();
        let view = swarm.one_group(&format!("{nodes} from two parts"), &all).await;
        assert_eq!(view.state.wanted().count(), 2, "both parts' instances are kept");
    }
}

#[tokio::test(start_paused = true)]
async fn another_leads_when_the_leader_is_killed_and_the_state_is_kept() {
    for nodes in [2, 3, 5] {
        let mut swarm = Swarm::of("leader_is_killed", nodes).await;
        let all: Vec<usize> = (0..nodes).collect();
        let before = swarm.one_group("formed", &all).await;
        swarm.desire(nodes - 1, 1).await;
        // Of two nodes the leader alone votes, so what it confirms may reach the other a moment later.
        swarm.one_group("known to all", &all).await;
        let leader = swarm.leader(&all).unwrap();
        swarm.kill(leader).await;
        let left: Vec<usize> = all.iter().copied().filter(|n| *n != leader).collect();
        swarm.wait(&format!("another of {nodes} leads"), || swarm.leader(&left).is_some()).await;
        swarm.desire(left[0], 2).await;
        let after = swarm.one_group("settled without it", &left).await;
        assert_eq!(after.state.wanted().count(), 2);
        assert!(after.token > before.token);
        assert_eq!(after.state.members.len(), nodes, "who is gone stays a member");

        swarm.start(leader).await;
        let back = swarm.one_group("it is back", &all).await;
        assert_eq!(back.state.wanted().count(), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn killed_one_after_the_other_down_to_one() {
    let mut swarm = Swarm::of("down_to_one", 5).await;
    let mut left: Vec<usize> = (0..5).collect();
    swarm.one_group("formed", &left).await;
    swarm.desire(0, 1).await;
    let mut instances = 1;
    while left.len() > 1 {
        // The leader each other time, so that both kinds of loss are met; the last but one is killed right after another.
        let leader = swarm.leader(&left).unwrap_or(left[0]);
        if left.len() == 2 {
            // The leader alone votes by now, or soon: what it confirms may reach the other a moment later.
            swarm
                .wait("known to both", || {
                    left.iter().all(|n| swarm.view(*n).state == swarm.view(left[0]).state)
                })
                .await;
        }
        let victim =
            if left.len().is_multiple_of(2) { leader } else { *left.iter().find(|n| **n != leader).unwrap() };
        swarm.kill(victim).await;
        left.retain(|n| *n != victim);
        swarm.wait(&format!("{} left: led", left.len()), || swarm.leader(&left).is_some()).await;
        instances += 1;
        swarm.desire(left[0], instances).await;
    }
    let view = swarm.one_group("the last one", &left).await;
    assert_eq!(view.state.wanted().count() as u32, instances);
    let mut back = left.clone();
    for n in 0..5 {
        if !left.contains(&n) {
            swarm.start(n).await;
            back.push(n);
            back.sort_unstable();
            let view = swarm.one_group(&format!("{} again", back.len()), &back).await;
            assert_eq!(view.state.wanted().count() as u32, instances);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn four_of_five_killed_at_once_leave_one_that_goes_on() {
    let mut swarm = Swarm::of("four_of_five", 5).await;
    let all: Vec<usize> = (0..5).collect();
    swarm.one_group("formed", &all).await;
    swarm.desire(3, 1).await;
    swarm.one_group("known to all", &all).await;
    for n in 0..4 {
        swarm.kill(n).await;
    }
    let view = swarm.one_group("one left", &[4]).await;
    assert!(view.state.instances.contains_key(&instance(1)));
    assert!(view.number > 0);
}

#[tokio::test(start_paused = true)]
async fn a_swarm_cut_in_two_halves_works_in_both_and_heals() {
    let all = [0, 1, 2, 3];
    let swarm = Swarm::of("cut_in_two", 4).await;
    swarm.one_group("formed", &all).await;
    for n in [1, 2, 3] {
        swarm.desire(0, n).await;
    }
    swarm.one_group("known to all", &all).await;
    swarm.cut(&[0, 1], &[2, 3]);
    swarm.wait("both halves lead", || [[0, 1], [2, 3]].iter().all(|half| swarm.leader(half).is_some())).await;
    swarm.desire(0, 10).await;
    swarm.propose(0, Command::Stop(instance(1))).await.unwrap();
    swarm.desire(3, 20).await;
    swarm.propose(2, Command::Stop(instance(2))).await.unwrap();
    // An instance that one half stops and the other changes is stopped.
    swarm.propose(1, Command::Stop(instance(3))).await.unwrap();
    let mut changed = desired(3);
    changed.slots = 9;
    swarm.propose(3, Command::Desire(changed)).await.unwrap();
    swarm.one_group("one half", &[0, 1]).await;
    swarm.one_group("the other half", &[2, 3]).await;
    swarm.heal();
    let view = swarm.one_group("healed", &all).await;
    let wanted: Vec<_> = view.state.wanted().map(|desired| desired.id.clone()).collect();
    assert_eq!(wanted, [instance(10), instance(20)]);
}

#[tokio::test(start_paused = true)]
async fn a_minority_that_was_cut_off_comes_back() {
    let swarm = Swarm::of("minority", 5).await;
    let all = [0, 1, 2, 3, 4];
    swarm.one_group("formed", &all).await;
    let leader = swarm.leader(&all).unwrap();
    let minority = [leader, (leader + 1) % 5];
    let majority: Vec<usize> = all.iter().copied().filter(|n| !minority.contains(n)).collect();
    swarm.cut(&minority, &majority);
    // The deposed leader's writes end by their deadline or, once it has begun anew, are carried out there.
    let from = Instant::now();
    let written = swarm.propose(leader, Command::Desire(desired(1))).await;
    println!("  a deposed leader's write: {:?} after {:.2} s", written, from.elapsed().as_secs_f64());
    assert!(from.elapsed() <= Duration::from_secs(11));
    swarm.desire(majority[0], 2).await;
    swarm
        .wait("both parts lead", || swarm.leader(&minority).is_some() && swarm.leader(&majority).is_some())
        .await;
    swarm.heal();
    let view = swarm.one_group("healed", &all).await;
    assert!(view.state.instances.contains_key(&instance(2)));
    assert_eq!(view.state.instances.contains_key(&instance(1)), written.is_ok());
}

#[tokio::test(start_paused = true)]
async fn restarted_one_alone_and_then_the_rest() {
    for first in 0..3 {
        let mut swarm = Swarm::of("one_alone", 3).await;
        let all = [0, 1, 2];
        swarm.one_group("formed", &all).await;
        swarm.desire(1, 1).await;
        swarm.one_group("known to all", &all).await;
        for n in all {
            swarm.kill(n).await;
        }
        swarm.start(first).await;
        let alone = swarm.one_group("alone", &[first]).await;
        assert!(alone.state.instances.contains_key(&instance(1)));
        swarm.desire(first, 2).await;
        for n in all {
            if n != first {
                swarm.start(n).await;
            }
        }
        let view = swarm.one_group("the rest is back", &all).await;
        assert_eq!(view.state.wanted().count(), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn all_restarted_find_their_state() {
    for nodes in [2, 3, 5] {
        let mut swarm = Swarm::of("all_restarted", nodes).await;
        let all: Vec<usize> = (0..nodes).collect();
        let before = swarm.one_group("formed", &all).await;
        swarm.desire(1, 1).await;
        let before_restart = swarm.one_group("known to all", &all).await;
        for n in &all {
            swarm.kill(*n).await;
        }
        for n in &all {
            swarm.start(*n).await;
        }
        let view = swarm.one_group(&format!("{nodes} again"), &all).await;
        assert!(view.state.instances.contains_key(&instance(1)));
        assert_eq!(view.group, before.group, "nobody began anew");
        assert_eq!(view.state, before_restart.state);
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_lost_its_disk_comes_back_under_a_new_id() {
    let mut swarm = Swarm::of("lost_its_disk", 3).await;
    let all = [0, 1, 2];
    swarm.one_group("formed", &all).await;
    swarm.desire(0, 1).await;
    for victim in all {
        swarm.kill(victim).await;
        swarm.wipe(victim);
        swarm.start(victim).await;
        let view = swarm.one_group(&format!("node {victim} is back"), &all).await;
        assert!(view.state.instances.contains_key(&instance(1)));
    }
    let ids: Vec<u64> = all.iter().map(|n| swarm.get(*n).beat().raft_id).collect();
    println!("  raft ids: {ids:?}");
}

#[tokio::test(start_paused = true)]
async fn a_removed_node_is_not_taken_back_by_itself() {
    let swarm = Swarm::of("removed", 4).await;
    swarm.one_group("formed", &[0, 1, 2, 3]).await;
    let leader = swarm.leader(&[0, 1, 2, 3]).unwrap();
    let mut left = vec![0, 1, 2, 3];
    for victim in [(leader + 1) % 4, leader] {
        left.retain(|n| *n != victim);
        swarm.propose(left[0], Command::RemoveMember { node: node(victim) }).await.unwrap();
        swarm
            .wait(&format!("node {victim} is out"), || {
                let group = swarm.view(left[0]).group;
                let settled = left.iter().map(|n| swarm.view(*n)).all(|view| {
                    view.group == group
                        && view.leader.as_ref().is_some_and(|leader| *leader != node(victim))
                        && !view.voters.contains(&node(victim))
                        && view.state.removed.contains_key(&node(victim))
                });
                settled && swarm.view(victim).group != group
            })
            .await;
        swarm.one_group("the others go on", &left).await;
    }
    // The gate lets it in again: its addition is later than its removal.
    let back = (leader + 1) % 4;
    let command = Command::AddMember { node: node(back), name: format!("name of {}", node(back)) };
    swarm.propose(left[0], command).await.unwrap();
    left.push(back);
    left.sort_unstable();
    swarm.one_group("added again", &left).await;
}

#[tokio::test(start_paused = true)]
async fn the_highest_token_obeyed_outlives_everything() {
    let mut swarm = Swarm::of("token_obeyed", 2).await;
    let view = swarm.one_group("formed", &[0, 1]).await;
    let learner = 1 - swarm.leader(&[0, 1]).unwrap();
    swarm.get(learner).obey(view.token).await.unwrap();
    swarm.get(learner).obey(view.token).await.unwrap();
    let lower = Token { number: 0, ..view.token };
    let answer = swarm.get(learner).obey(lower).await;
    assert!(matches!(answer, Err(NotObeyed::Higher(higher)) if higher == view.token), "{answer:?}");

    // A scheduler of another group was obeyed meanwhile: this one commands nothing until its number is higher.
    let foreign = Token { number: view.number + 7, group: GroupId(1), term: 1 };
    swarm.get(learner).obey(foreign).await.unwrap();
    swarm.wait("the number is higher", || swarm.view(learner).number > foreign.number).await;
    let view = swarm.one_group("commands again", &[0, 1]).await;
    assert!(view.token > foreign);

    swarm.kill(learner).await;
    swarm.start(learner).await;
    let answer = swarm.get(learner).obey(view.token).await;
    assert!(answer.is_ok());
    let answer = swarm.get(learner).obey(foreign).await;
    assert!(matches!(answer, Err(NotObeyed::Higher(higher)) if higher == view.token), "{answer:?}");
}

/// A node that carries out each state whose token it may obey never sees one without what it runs, while its group becomes
/// part of another.
#[tokio::test(start_paused = true)]
async fn what_a_node_runs_is_in_every_state_that_it_obeys_while_groups_merge() {
    let all = [0, 1, 2, 3];
    let swarm = Swarm::of("every_state", 4).await;
    swarm.cut(&[0, 1], &[2, 3]);
    let mut watching = Vec::new();
    for (number, pair) in [[0, 1], [2, 3]].into_iter().enumerate() {
        let number = number as u32;
        swarm.one_group("a pair", &pair).await;
        // So many that a node which is taken in gets them in several calls.
        for n in 0..150 {
            swarm.propose(pair[0], Command::OpenWindow { until_unix_ms: n }).await.unwrap();
        }
        swarm.desire(pair[0], number).await;
        let placement = placed(&swarm.view(pair[0]).state, number, &pair);
        swarm.propose(pair[0], Command::Place(placement)).await.unwrap();
        swarm.one_group("it runs", &pair).await;
        for n in pair {
            let consensus = swarm.get(n);
            watching.push(tokio::spawn(async move {
                let mut views = consensus.view();
                let mut seen = 0;
                loop {
                    let view = views.borrow_and_update().clone();
                    if consensus.obey(view.token).await.is_ok() {
                        assert!(view.state.placements.contains_key(&instance(number)), "{n}: {view:?}");
                        seen += 1;
                    }
                    if view.state.placements.len() == 2 {
                        return seen;
                    }
                    views.changed().await.unwrap();
                }
            }));
        }
    }
    swarm.heal();
    swarm.one_group("healed", &all).await;
    for watching in watching {
        println!("  {} states obeyed", watching.await.unwrap());
    }
}

/// Writes through any node while nodes are killed and come back, always with a quorum alive: what was confirmed is there.
#[tokio::test(start_paused = true)]
async fn no_confirmed_write_is_lost_while_a_quorum_lives() {
    let mut swarm = Swarm::of("no_confirmed_write", 5).await;
    let all = [0, 1, 2, 3, 4];
    swarm.one_group("formed", &all).await;
    let mut confirmed = Vec::new();
    let mut number = 0;
    for round in 0..6 {
        let victim = match round % 2 {
            0 => swarm.leader(&all).unwrap(),
            _ => swarm.random(5) as usize,
        };
        swarm.kill(victim).await;
        for _ in 0..8 {
            let through = (victim + 1 + swarm.random(4) as usize) % 5;
            number += 1;
            if swarm.propose(through, Command::Desire(desired(number))).await.is_ok() {
                confirmed.push(number);
            }
        }
        swarm.start(victim).await;
        let view = swarm.one_group(&format!("round {round}"), &all).await;
        for number in &confirmed {
            assert!(view.state.instances.contains_key(&instance(*number)), "{number} is lost");
        }
        assert_eq!(view.number, swarm.view(0).number);
    }
    println!("  {} of {number} writes confirmed", confirmed.len());
    assert!(confirmed.len() as u32 > number / 2);
}

#[tokio::test(start_paused = true)]
async fn any_node_takes_a_command() {
    let all: Vec<usize> = (0..7).collect();
    let swarm = Swarm::of("any_node", 7).await;
    let view = swarm.one_group("formed", &all).await;
    assert_eq!(view.voters.len(), 5);
    for n in &all {
        swarm.desire(*n, *n as u32).await;
        assert!(
            swarm.view(*n).state.instances.contains_key(&instance(*n as u32)),
            "node {n} sees what it proposed"
        );
    }
    let removed = swarm.propose(6, Command::RemoveMember { node: node(9) }).await;
    assert_eq!(removed, Err(ProposeError::Refused(Refusal::UnknownNode(node(9)))));
}

#[tokio::test(start_paused = true)]
async fn a_leader_whose_disk_fails_is_replaced_and_comes_back() {
    let all = [0, 1, 2];
    let mut swarm = Swarm::of("disk_fails", 3).await;
    swarm.one_group("formed", &all).await;
    let leader = swarm.leader(&all).unwrap();
    let others: Vec<usize> = all.iter().copied().filter(|n| *n != leader).collect();
    swarm.break_disk(leader, true);
    let written = swarm.propose(others[0], Command::Desire(desired(1))).await;
    println!("  a write meanwhile: {written:?}");
    swarm.wait("another leads", || swarm.leader(&others).is_some()).await;
    swarm.desire(others[0], 2).await;
    let token = swarm.view(others[0]).token;
    assert!(matches!(swarm.get(leader).obey(token).await, Err(NotObeyed::Store(_))), "it cannot be kept");
    swarm.break_disk(leader, false);
    let view = swarm.one_group("mended", &all).await;
    assert!(view.state.instances.contains_key(&instance(2)));
    assert!(swarm.get(leader).obey(token).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_damaged_store_is_named_and_nothing_else_happens() {
    let mut swarm = Swarm::of("damaged_store", 1).await;
    swarm.one_group("leads", &[0]).await;
    swarm.kill(0).await;
    let good = swarm.disk(0).scan("seat").await.unwrap();
    let damaged = Change::Put("seat".to_owned(), b"{".to_vec());
    swarm.disk(0).write(vec![damaged]).await.unwrap();
    let error = swarm.try_start(0).await.unwrap_err();
    assert!(
        matches!(&error, StartError::Store(StoreError::Damaged { key, .. }) if key == "seat"),
        "{error:?}"
    );
    let mended = good.into_iter().map(|(key, value)| Change::Put(key, value)).collect();
    swarm.disk(0).write(mended).await.unwrap();
    swarm.start(0).await;
    swarm.one_group("leads again", &[0]).await;
}

/// The same code on several threads and the real clock; seconds printed are real ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_real_time_three_nodes_form_a_group_and_outlive_their_leader() {
    let mut swarm = Swarm::of("in_real_time", 3).await;
    let all = [0, 1, 2];
    swarm.one_group("formed", &all).await;
    swarm.desire(2, 1).await;
    let leader = swarm.leader(&all).unwrap();
    swarm.kill(leader).await;
    let left: Vec<usize> = all.iter().copied().filter(|n| *n != leader).collect();
    swarm.wait("another leads", || swarm.leader(&left).is_some()).await;
    swarm.desire(left[0], 2).await;
    swarm.start(leader).await;
    let view = swarm.one_group("it is back", &all).await;
    assert_eq!(view.state.wanted().count(), 2);
}

/// Nodes die, restart, lose their disks, and links break and mend, at random. When all is whole again there is one group.
#[tokio::test(start_paused = true)]
async fn whatever_happens_one_group_results() {
    let mut swarm = Swarm::of("whatever_happens", 5).await;
    let all = [0, 1, 2, 3, 4];
    let mut running = [true; 5];
    for _ in 0..30 {
        let n = swarm.random(5) as usize;
        match swarm.random(8) {
            0 | 1 if running[n] => {
                swarm.kill(n).await;
                running[n] = false;
            }
            2 if !running[n] => {
                swarm.wipe(n);
                swarm.start(n).await;
                running[n] = true;
            }
            3 | 4 if !running[n] => {
                swarm.start(n).await;
                running[n] = true;
            }
            5 => {
                let side = swarm.random(32);
                let (a, b): (Vec<usize>, Vec<usize>) = all.iter().partition(|n| side >> **n & 1 == 0);
                swarm.cut(&a, &b);
            }
            6 => {
                let (a, b) = (n, swarm.random(5) as usize);
                swarm.cut(&[a], &[b]);
            }
            7 => swarm.heal(),
            _ => {}
        }
        let pause = swarm.random(6000);
        sleep(Duration::from_millis(pause)).await;
    }
    swarm.heal();
    for n in all {
        if !running[n] {
            swarm.start(n).await;
        }
    }
    swarm.one_group("one group", &all).await;
    swarm.desire(0, 1).await;
    swarm.one_group("it works", &all).await;
}
