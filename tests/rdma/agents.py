"""A swarm of agents, one in each of the guests of `guests.Guests`, and what is asked of it."""

import json
import os
import shutil

from guests import within

# Emulated processors beside busy ones: these end a run that hangs, and promise nothing.
FORMS_S = 240
LOADS_S = 240
ANSWERS_S = 400
UPGRADES_S = 240

CONTEXT = 1024


class Swarm:
    """Agents that find each other over their cables alone. `models` is a folder of models on the host."""

    def __init__(self, guests, models):
        self.guests = guests
        self.nodes = range(guests.count)
        shutil.copytree(models, guests.share / "models", copy_function=link_or_copy)
        for node in self.nodes:
            guests.do(node, "mkdir -m 700 /tmp/run && cp -r /share/models /tmp/models", LOADS_S)

    def start(self, *options, environment=""):
        """Starts all agents and waits until they are one swarm. Started again, they are the nodes that they were."""
        for node in self.nodes:
            names = self.guests.do(node, "cut -d ' ' -f 2 $LINKS_FILE").split()
            interfaces = " ".join(f"--interface {name}=thunderbolt" for name in names)
            self.guests.do(
                node,
                f"XDG_RUNTIME_DIR=/tmp/run {environment} setsid shoal up --name g{node} --swarm guests "
                "--data-dir /tmp/data --model-dir /tmp/models --data-listen 0.0.0.0:7712 --threads 1 "
                f"{interfaces} {' '.join(options)} >>/share/agent{node}.log 2>&1 & echo $! >/tmp/agent",
            )
        within("the swarm is formed", FORMS_S, self._is_formed)

    def _is_formed(self):
        for node in self.nodes:
            ready = [n["name"] for n in self.status(node)["nodes"] if n["state"] == "ready"]
            assert len(ready) == len(self.nodes), f"node {node} knows {ready}"

    def stop(self):
        """Ctrl-C for all of them."""
        for node in self.nodes:
            self.guests.do(node, "kill -INT $(cat /tmp/agent)")
        for node in self.nodes:
            self.guests.do(node, "while kill -0 $(cat /tmp/agent) 2>/dev/null; do sleep 0.1; done")

    def shoal(self, node, command, seconds=120):
        """What a command of the binary says as JSON."""
        return json.loads(self.guests.do(node, f"shoal {command} --json --data-dir /tmp/data 2>/tmp/said", seconds))

    def status(self, node):
        return self.shoal(node, "status")

    def await_links(self, wanted):
        """Waits until every node shows these states of links, and no others; the links as the first node shows them."""
        def look():
            shown = [self.status(node)["links"] for node in self.nodes]
            for node, links in enumerate(shown):
                known = [(link["a_address"], link["b_address"], link["state"], link["reason"]) for link in links]
                assert sorted(link["state"] for link in links) == sorted(wanted), f"node {node}: {known}"
            return shown[0]
        return within(f"links are {wanted}", UPGRADES_S, look)

    def serve(self, model, parallel):
        """Has a model served and waits until it answers; the instance."""
        command = f"serve {model} --parallel {parallel} --cut memory --context {CONTEXT} --slots 1"
        return self.shoal(0, command, LOADS_S)["instance"]

    def unserve(self, instance):
        self.shoal(0, f"stop {instance}")

    def ask(self, instance, prompt, tokens, node=0):
        """A greedy answer: its tokens, and the digest of their logits."""
        answer = json.loads(self.guests.do(node, post(question(instance, prompt, tokens)), ANSWERS_S))
        return trace(answer, tokens)

    def begin(self, instance, prompt, tokens, node=0):
        """Asks in the background."""
        return Stream(self.guests, node, instance, prompt, tokens)


class Stream:
    """An answer that comes while other things are done."""

    def __init__(self, guests, node, instance, prompt, tokens):
        self.tokens = tokens
        self.file = guests.share / f"stream{guests.said}"
        guests.do(node, f"{post(question(instance, prompt, tokens, stream=True))} >/share/{self.file.name} 2>&1 &")

    def events(self):
        """What has come so far."""
        whole = self.file.read_text(errors="replace").split("\n\n")[:-1]
        return [event.removeprefix("data: ") for event in whole if event.startswith("data: ")]

    def await_events(self, count):
        def look():
            assert len(self.events()) >= count, f"{len(self.events())} events"
        within(f"{count} events", ANSWERS_S, look)

    def finish(self):
        """Waits for the end: the whole answer's tokens and the digest of their logits."""
        def look():
            assert "[DONE]" in self.events(), f"{len(self.events())} events"
        within("the answer ends", ANSWERS_S, look)
        events = [json.loads(event) for event in self.events() if event != "[DONE]"]
        assert not [event for event in events if event.get("error")], events[-1]
        traced, = [event for event in events if event.get("shoal")]
        return trace(traced, self.tokens)


def question(instance, prompt, tokens, stream=False):
    return {
        "model": instance, "temperature": 0, "max_tokens": tokens, "stream": stream,
        "messages": [{"role": "user", "content": prompt}], "shoal": {"ignore_eos": True, "trace": True},
    }


def trace(answer, tokens):
    found = answer["shoal"]["tokens"], answer["shoal"]["logits_sha256"]
    assert len(found[0]) == tokens and found[1], answer
    return found


def post(body):
    """The command of a guest that sends a chat request."""
    text = json.dumps(body)
    assert "'" not in text
    return (f"wget -q -O - --header 'Content-Type: application/json' --post-data '{text}' "
            "http://$(sed -n 's/.*\"http\": *\"\\([^\"]*\\)\".*/\\1/p' /tmp/data/agent.json)/v1/chat/completions")


def link_or_copy(source, target):
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
