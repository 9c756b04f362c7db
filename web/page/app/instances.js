// The models being served: how far each is, and which node holds which layers.

import { ask } from "/app/api.js";
import { tone } from "/app/colours.js";
import { byId, el, keyed, setAttribute, setHidden, setText } from "/app/dom.js";
import { bytes, count, layers, nodeName, percent, plural } from "/app/format.js";
import { bar, sure, whyNot } from "/app/parts.js";

const STATES = { placing: "warn", loading: "warn", ready: "good", failed: "bad", stopping: "warn" };

// What answers comes first.
const ORDER = ["ready", "loading", "placing", "failed", "stopping"];

// With more stages than this, the bar has no room for figures.
const NAMED_STAGES = 9;

const sum = (list, field) => list.reduce((total, one) => total + (one[field] ?? 0), 0);

// One stage in the bar of layers: as wide as its layers are many, filled as far as its ranks are loaded.
function segment() {
  const fill = el("span", { class: "segment-fill" });
  const name = el("span", { class: "segment-name" });
  const root = el("div", { class: "segment" }, fill, name);
  return {
    root,
    update: ({ stage, swarm }) => {
      const weights = sum(stage.ranks, "weights_bytes");
      const ready = stage.ranks.every((rank) => rank.state === "ready");
      const lost = stage.ranks.some((rank) => rank.state === "lost");
      const loaded = ready ? 100 : percent(sum(stage.ranks, "loaded_bytes"), weights);
      const names = stage.ranks.map((rank) => nodeName(swarm, rank.node)).join(", ");
      setAttribute(root, "class", `segment ${tone(stage.ranks[0]?.node ?? "")}${lost ? " lost" : ""}`);
      setAttribute(root, "title", `${names}: ${layers(stage.layers)}`);
      root.style.flexGrow = String(Math.max(1, stage.layers[1] - stage.layers[0]));
      fill.style.width = `${loaded.toFixed(1)}%`;
      setText(name, String(stage.layers[1] - stage.layers[0]));
    },
  };
}

// One stage in the list under the bar.
function stageRow() {
  const name = el("th", { scope: "row" });
  const range = el("td", { class: "range" });
  const memory = el("td", { class: "num" });
  const state = el("td");
  const steps = el("td", { class: "num" });
  const root = el("tr", null, name, range, memory, state, steps);
  return {
    root,
    update: ({ stage, rank, swarm }) => {
      setAttribute(name, "class", tone(rank.node));
      setText(name, nodeName(swarm, rank.node));
      setText(range, `${stage.layers[0]} to ${Math.max(stage.layers[0], stage.layers[1] - 1)}`);
      setText(memory, bytes(rank.weights_bytes + rank.kv_bytes + rank.scratch_bytes));
      setAttribute(memory, "title", `weights ${bytes(rank.weights_bytes)}, KV cache ${bytes(rank.kv_bytes)}, other ${bytes(rank.scratch_bytes)}`);
      const progress = rank.state === "loading" && rank.loaded_bytes !== null ? ` ${Math.floor(percent(rank.loaded_bytes, rank.weights_bytes))} %` : "";
      setText(state, rank.state + progress);
      setText(steps, count(rank.steps_total));
    },
  };
}

function stageTable() {
  const heads = ["Node", "Layers", "Memory", "State", "Steps"];
  const head = heads.map((text) => el("th", { scope: "col", class: text === "Memory" || text === "Steps" ? "num" : null, text }));
  const body = el("tbody");
  const rows = keyed(body, stageRow);
  const scroll = { class: "scroll", tabindex: "0", role: "group", "aria-label": "Who holds which layers" };
  const root = el("div", scroll, el("table", null, el("thead", null, el("tr", null, head)), body));
  return {
    root,
    update: (instance, swarm) =>
      rows(
        instance.stages.flatMap((stage) => stage.ranks.map((rank) => ({ stage, rank, swarm }))),
        ({ stage, rank }) => `${stage.index} ${rank.rank}`,
      ),
  };
}

/** What a request alone gets, as seen, or else as predicted. */
function speed(instance) {
  const { seen_tokens_per_s: seen, predicted_tokens_per_s: predicted } = instance;
  if (typeof seen === "number") return `${count(Math.round(seen))} tokens/s`;
  return typeof predicted === "number" ? `about ${count(Math.round(predicted))} tokens/s expected` : null;
}

function card(item, { onChat }) {
  const { id, model } = item.instance;
  const state = el("span", { class: "pill" });
  const facts = el("p", { class: "quiet" });
  const reason = el("p", { class: "note" });
  const lacks = el("div", { class: "why-not" });
  let shownLacks = "";
  const stages = el("div", { class: "stages", role: "img" });
  const segments = keyed(stages, segment);
  const table = stageTable();
  const kv = bar();
  const kvText = el("p", { class: "quiet" });
  const failure = el("p", { class: "note bad", role: "alert", hidden: true });
  const talk = el("button", { type: "button", text: "Chat", onclick: () => onChat(model) });
  const stop = sure("Stop", "Really stop?", async () => {
    try {
      await ask("DELETE", `/api/v1/instances/${encodeURIComponent(id)}`);
      setHidden(failure, true);
    } catch (error) {
      setText(failure, [error.message, error.fix].filter(Boolean).join(" "));
      setHidden(failure, false);
    }
  });
  stop.setAttribute("aria-label", `Stop ${id}`);
  const root = el(
    "article",
    { class: "instance", "aria-label": `Instance ${id}` },
    el("div", { class: "instance-head" }, el("h3", { text: model }), el("code", { class: "quiet", text: id }), state, el("div", { class: "actions" }, talk, stop)),
    facts,
    reason,
    lacks,
    stages,
    table.root,
    el("div", { class: "kv" }, kv.root, kvText),
    failure,
  );
  return {
    root,
    update: ({ instance, swarm }) => {
      setText(state, instance.state);
      setAttribute(state, "class", `pill ${STATES[instance.state] ?? ""}`);
      const words = [
        instance.context === null ? "context chosen when it is placed" : `context ${count(instance.context)}`,
        plural(instance.slots, "slot", "slots"),
        instance.parallel === "auto" ? null : instance.parallel,
        instance.active ? `${count(instance.active)} active` : null,
        instance.queued ? `${count(instance.queued)} queued` : null,
        speed(instance),
      ];
      setText(facts, words.filter(Boolean).join(" · "));
      setHidden(reason, instance.reason === null);
      if (instance.reason) {
        // Some messages are sentences with their full stop, some are not.
        const message = instance.reason.message.replace(/\.$/, "");
        setText(reason, [message, instance.reason.fix].filter(Boolean).join(". Try: "));
      }
      const why = JSON.stringify(instance.why_not);
      if (why !== shownLacks) {
        shownLacks = why;
        lacks.replaceChildren(...(instance.why_not ? whyNot(instance.why_not).filter(Boolean) : []));
      }
      const placed = instance.stages.length > 0;
      setHidden(stages, !placed);
      setHidden(table.root, !placed);
      stages.classList.toggle("many", instance.stages.length > NAMED_STAGES);
      segments(instance.stages.map((stage) => ({ stage, swarm })), ({ stage }) => stage.index);
      const parts = instance.stages.map((stage) => `${stage.ranks.map((rank) => nodeName(swarm, rank.node)).join(" and ")} ${layers(stage.layers)}`);
      setAttribute(stages, "aria-label", `Layers by node: ${parts.join("; ")}`);
      table.update(instance, swarm);
      const { used_tokens: used, total_tokens: total } = instance.kv;
      const known = used !== null && total !== null;
      setHidden(kv.root.parentElement, !known);
      if (known) {
        const type = instance.kv.type === "q8" ? " in 8 bits" : "";
        const text = `KV cache${type}: ${count(used)} of ${count(total)} tokens`;
        kv.update(percent(used, total), text);
        setText(kvText, text);
      }
      setHidden(talk, instance.state !== "ready" && instance.state !== "loading");
      stop.hidden = instance.state === "stopping";
    },
  };
}

export function instances(actions) {
  const list = byId("instances");
  const empty = el("p", { class: "empty", text: "Nothing is served yet. Choose a model above, or run: shoal serve smollm2-135m" });
  list.after(empty);
  const cards = keyed(list, (item) => card(item, actions));
  return (swarm) => {
    const sorted = [...swarm.instances].sort(
      (a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state) || a.model.localeCompare(b.model) || (a.id < b.id ? -1 : 1),
    );
    cards(sorted.map((instance) => ({ instance, swarm })), (item) => item.instance.id);
    setHidden(empty, sorted.length > 0);
  };
}
