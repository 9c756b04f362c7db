// The machines, each with its memory and the layers it holds.

import { tone } from "/app/colours.js";
import { byId, el, keyed, setAttribute, setHidden, setText } from "/app/dom.js";
import { bytes, count, layers, percent, plural, rate } from "/app/format.js";
import { bar } from "/app/parts.js";

const STATES = { joining: "warn", ready: "good", draining: "warn", suspect: "warn", gone: "bad" };

// What a node holds: "smollm2-135m: layers 0 to 13".
function held(swarm, id) {
  return swarm.instances.flatMap((instance) =>
    instance.stages
      .filter((stage) => stage.ranks.some((rank) => rank.node === id))
      .map((stage) => ({ key: `${instance.id} ${stage.index}`, text: `${instance.model}: ${layers(stage.layers)}` })),
  );
}

function chip(item) {
  const root = el("li", { class: "chip" });
  return { root, update: (next) => setText(root, next.text) };
}

function card(item) {
  const name = el("h3");
  const own = el("span", { class: "tag", text: "this node" });
  const role = el("span", { class: "tag strong", text: "scheduler" });
  const state = el("span", { class: "pill" });
  const memory = bar();
  const use = el("p", { class: "use" });
  const machine = el("p", { class: "quiet" });
  const speed = el("p", { class: "quiet" });
  const list = el("ul", { class: "chips", "aria-label": "Layers on this node" });
  const chips = keyed(list, chip);
  const root = el(
    "li",
    { class: `node ${tone(item.node.id)}` },
    el("div", { class: "node-head" }, el("span", { class: "swatch", "aria-hidden": "true" }), name, role, own, state),
    memory.root,
    use,
    list,
    machine,
    speed,
  );
  return {
    root,
    update: ({ node, swarm }) => {
      setText(name, node.name);
      setAttribute(name, "title", node.id);
      setHidden(own, node.id !== swarm.self);
      setHidden(role, node.id !== swarm.scheduler);
      setText(state, node.state);
      setAttribute(state, "class", `pill ${STATES[node.state] ?? ""}`);
      setAttribute(root, "data-state", node.state);
      const { used_bytes: used, offered_bytes: offered, total_bytes: total, available_bytes: free } = node.memory;
      const text = offered === 0 ? "offers no memory to models" : `${bytes(used)} of ${bytes(offered)} offered`;
      memory.update(percent(used, offered), `Memory of ${node.name}: ${text}`);
      setText(use, text);
      chips(held(swarm, node.id), (one) => one.key);
      const facts = [
        node.cpu,
        node.threads && plural(node.threads, "thread", "threads"),
        total && `${bytes(total)} memory${free === null ? "" : `, ${bytes(free)} free`}`,
      ];
      setText(machine, facts.filter(Boolean).join(" · "));
      const measured = [
        node.os && `${node.os} ${node.arch ?? ""}`.trim(),
        node.version && `shoal ${node.version}`,
        node.memory_read_bytes_per_s && `reads ${rate(node.memory_read_bytes_per_s)}`,
        node.rdma.length > 0 && plural(node.rdma.length, "RDMA device", "RDMA devices"),
        node.reason,
        node.state !== "ready" && node.last_seen_ms !== null && `last heard ${count(Math.round(node.last_seen_ms / 1000))} s ago`,
      ];
      setText(speed, measured.filter(Boolean).join(" · "));
    },
  };
}

function refusal() {
  const who = el("strong");
  const why = el("span");
  const root = el("p", { class: "note" }, who, " ", why);
  return {
    root,
    update: (item) => {
      setText(who, `${item.name ?? item.id} was not let in.`);
      setText(why, item.text);
    },
  };
}

export function nodes() {
  const cards = keyed(byId("nodes"), card);
  const refused = keyed(byId("refused"), refusal);
  return (swarm) => {
    const sorted = [...swarm.nodes].sort((a, b) => a.name.localeCompare(b.name) || (a.id < b.id ? -1 : 1));
    cards(sorted.map((node) => ({ node, swarm })), (item) => item.node.id);
    refused(swarm.refused, (item) => item.id);
  };
}
