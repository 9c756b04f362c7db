"""Agents whose cables upgrade themselves to queue pairs: answers have the bits that they have over TCP, and what fails heals.

SHOAL_GUEST_BIN is the binary, SHOAL_TEST_MODEL_DIR a folder of models with SmolLM2, SHOAL_GUEST_MODELS one with a made-up
llama named `million`. With SHOAL_TEST_LONG every wiring is tried, else what takes little time.
"""

import os
import pathlib
import re

import pytest
from agents import Swarm
from guests import Guests, within

LONG = "SHOAL_TEST_LONG" in os.environ
SMOLLM2 = os.environ["SHOAL_TEST_MODEL_DIR"]
MILLION = os.environ["SHOAL_GUEST_MODELS"]
LOGS = pathlib.Path(os.environ["SUITE_DIR"])

PROMPT = "The sea"
TOKENS = 8
# So many that there is time to take something away meanwhile.
MANY = 150

# Name: nodes, topology, cables, placements.
WIRINGS = {
    "ring of 3": (3, "ring", 3, ["pipeline=3", "tensor=3"]),
    "line of 3": (3, "line", 2, ["pipeline=3", "tensor=3", "pipeline=2 --nodes g0,g2"]),
    "ring of 4": (4, "ring", 4, ["pipeline=4", "tensor=4"]),
    "mesh of 4": (4, "mesh", 6, ["pipeline=4", "tensor=4"]),
    "two parallel cables": (2, "0-1,0-1", 2, ["pipeline=2", "tensor=2"]),
}


def bed(name, nodes, topology, memory_mib=384):
    folder = LOGS / name.replace(" ", "-")
    return Guests(nodes, topology, folder, files=[os.environ["SHOAL_GUEST_BIN"]], memory_mib=memory_mib)


def answers(swarm, model, placements):
    """The answer of each placement, asked at the first node and at the last; both are one."""
    found = []
    for placement in placements:
        instance = swarm.serve(model, placement)
        first, last = (swarm.ask(instance, PROMPT, TOKENS, node) for node in (0, swarm.nodes[-1]))
        assert first == last, placement
        found.append(first)
        swarm.unserve(instance)
    return found


def over(swarm, mode, cables, model, placements, kind="rc", led_on=False):
    """Starts the agents, has them answer, ends them. The links must be in one state, before and after. `led_on`: nodes without
    a link must have spoken over the others' cables."""
    start(swarm, mode, kind)
    states = ["rdma" if mode == "always" else "tcp"] * cables
    before = carried(swarm.await_links(states))
    found = answers(swarm, model, placements)
    links = swarm.await_links(states)
    if mode == "always":
        assert {link["rdma"]["queue_pairs"] for link in links} == {kind}
        within("queue pairs have carried something", 60, lambda: more(carried(swarm.await_links(states)), before))
        if led_on:
            within("every cable led something on", 60, lambda: each_led_on(swarm, states))
    swarm.stop()
    return found


def start(swarm, mode, kind="rc"):
    swarm.start("--rdma", mode, environment="SHOAL_RDMA_KINDS=uc" if kind == "uc" else "")


def carried(links):
    """Bytes that queue pairs have carried."""
    return sum(link["rdma"]["bytes"] for link in links if link["rdma"])


def each_led_on(swarm, states):
    for link in swarm.await_links(states):
        assert link["rdma"]["flows"] > 0 and link["rdma"]["posted_on"] > 0, link


def more(now, then):
    assert now > then, f"{now}, and {then} before"


def queue_pairs(guests, node):
    """A line for each queue pair that some program has made."""
    return [line for line in guests.do(node, "rdma resource show qp").splitlines() if "comm shoal" in line]


def test_a_real_model_on_a_cable_of_either_kind():
    with bed("smollm2", 2, "line", memory_mib=640) as guests:
        swarm = Swarm(guests, SMOLLM2)
        plain = over(swarm, "never", 1, "smollm2-135m", ["pipeline=2"])
        # Reliable connections and unreliable ones, for devices that know no others.
        for kind in "rc", "uc":
            assert over(swarm, "always", 1, "smollm2-135m", ["pipeline=2"], kind) == plain, kind


@pytest.mark.parametrize("name", WIRINGS if LONG else ["ring of 3", "line of 3"])
def test_answers_are_those_over_tcp(name):
    nodes, topology, cables, placements = WIRINGS[name]
    with bed(name, nodes, topology) as guests:
        swarm = Swarm(guests, MILLION)
        plain = over(swarm, "never", cables, "million", placements)
        assert over(swarm, "always", cables, "million", placements, led_on=topology == "line") == plain


def test_a_device_taken_away_in_mid_answer():
    with bed("device", 2, "line") as guests:
        swarm = Swarm(guests, MILLION)
        start(swarm, "always")
        swarm.await_links(["rdma"])
        instance = swarm.serve("million", "tensor=2")
        undisturbed = swarm.ask(instance, PROMPT, MANY)
        stream = swarm.begin(instance, PROMPT, MANY)
        stream.await_events(20)
        guests.do(1, "rdma link delete rxe0")
        assert "[DONE]" not in stream.events(), "the answer ended too soon for this test"
        assert stream.finish() == undisturbed
        link, = swarm.await_links(["tcp"])
        assert link["reason"]
        print(f"the link says: {link['reason']}")
        guests.do(1, "rdma link add rxe0 type rxe netdev tb0")
        swarm.await_links(["rdma"])
        assert swarm.ask(instance, PROMPT, MANY) == undisturbed


def test_a_cable_that_loses_packets():
    with bed("lossy", 2, "line") as guests:
        swarm = Swarm(guests, MILLION)
        start(swarm, "always", "uc")
        swarm.await_links(["rdma"])
        instance = swarm.serve("million", "tensor=2")
        undisturbed = swarm.ask(instance, PROMPT, MANY)
        for node in swarm.nodes:
            guests.do(node, "/usr/bin/tc qdisc add dev tb0 root netem loss 2%")
        assert swarm.ask(instance, PROMPT, MANY) == undisturbed
        within("lost messages were sent again", 60, lambda: more(swarm.status(0)["links"][0]["rdma"]["resent"], 0))


if LONG:

    def test_a_device_between_taken_away_in_mid_answer():
        with bed("between", 3, "line") as guests:
            swarm = Swarm(guests, MILLION)
            start(swarm, "always")
            swarm.await_links(["rdma", "rdma"])
            instance = swarm.serve("million", "pipeline=2 --nodes g0,g2")
            undisturbed = swarm.ask(instance, PROMPT, MANY)
            before = led_on(swarm)
            assert all(flows > 0 for flows in before), before
            stream = swarm.begin(instance, PROMPT, MANY)
            stream.await_events(20)
            guests.do(1, "rdma link delete rxe1")
            assert "[DONE]" not in stream.events(), "the answer ended too soon for this test"
            assert stream.finish() == undisturbed
            swarm.await_links(["rdma", "tcp"])
            guests.do(1, "rdma link add rxe1 type rxe netdev tb1")
            swarm.await_links(["rdma", "rdma"])
            within("what is led on comes back to the cable", 60, lambda: all_more(led_on(swarm), before))
            assert swarm.ask(instance, PROMPT, MANY) == undisturbed

    def test_an_interface_down_in_mid_answer():
        with bed("interface", 2, "0-1,0-1") as guests:
            swarm = Swarm(guests, MILLION)
            start(swarm, "always")
            swarm.await_links(["rdma", "rdma"])
            instance = swarm.serve("million", "tensor=2")
            undisturbed = swarm.ask(instance, PROMPT, MANY)
            for name in "tb0", "tb1":
                stream = swarm.begin(instance, PROMPT, MANY)
                stream.await_events(20)
                guests.do(0, f"/usr/bin/ip link set {name} down")
                assert stream.finish() == undisturbed
                links = swarm.await_links(["down", "rdma"])
                assert all(link["reason"] for link in links if link["state"] == "down")
                guests.do(0, f"/usr/bin/ip link set {name} up")
                swarm.await_links(["rdma", "rdma"])

    def test_ten_rounds_leak_nothing():
        with bed("rounds", 2, "line") as guests:
            swarm = Swarm(guests, MILLION)
            start(swarm, "always")
            swarm.await_links(["rdma"])
            instance = swarm.serve("million", "tensor=2")
            held = None
            for _ in range(10):
                guests.do(1, "rdma link delete rxe0")
                swarm.await_links(["tcp"])
                swarm.ask(instance, PROMPT, TOKENS)
                assert not queue_pairs(guests, 0), "a broken cable left queue pairs at the other end"
                guests.do(1, "rdma link add rxe0 type rxe netdev tb0")
                swarm.await_links(["rdma"])
                swarm.ask(instance, PROMPT, TOKENS)
                # The first round says what a cable takes.
                held = held or holds(guests)
                within("no more is held than after the first round", 60, lambda held=held: no_more(holds(guests), held))


def led_on(swarm):
    return [link["rdma"]["flows"] for link in swarm.status(0)["links"]]


def all_more(now, then):
    assert all(n > t for n, t in zip(now, then, strict=True)), f"{now}, and {then} before"


def holds(guests):
    """How many queue pairs, regions and the rest each node's device holds, and how many descriptors the agent."""
    look = "rdma resource show rxe0 && ls /proc/$(cat /tmp/agent)/fd | wc -l"
    # The device's number is another one each time that it is added.
    said = [guests.do(node, look).split(":", 1)[1] for node in range(guests.count)]
    return [[int(figure) for figure in re.findall(r"\b\d+\b", one)] for one in said]


def no_more(now, then):
    # Less is no leak: connections of the first round's questions may not have ended when it was looked at.
    assert all(n <= t for one, other in zip(now, then, strict=True) for n, t in zip(one, other, strict=True)), f"{now}, and {then} before"
