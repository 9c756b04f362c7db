// The bar at the top: which swarm, who decides, how fresh this is, and the door for more machines.

import { ask } from "/app/api.js";
import { byId, el, keyed, setAttribute, setHidden, setText } from "/app/dom.js";
import { bytes, nodeName, plural, seconds, time } from "/app/format.js";

const OPEN_SECONDS = 600;

function fact(item) {
  const value = el("dd");
  const root = el("div", { class: "fact" }, el("dt", { text: item.label }), value);
  return {
    root,
    update: (next) => {
      setText(value, next.value);
      setAttribute(value, "title", next.title);
    },
  };
}

export function header() {
  const live = byId("live");
  const banner = byId("banner");
  const button = byId("add-machines");
  const facts = keyed(byId("facts"), fact);
  let swarm = null;
  let failure = null;

  const countdown = () => {
    if (!swarm) return;
    const left = swarm.open_until ? (Date.parse(swarm.open_until) - Date.now() - swarm.clock_ms) / 1000 : 0;
    if (swarm.open_always) setText(button, "Open to all machines");
    else if (left > 0) setText(button, `Open ${seconds(left)}`);
    else setText(button, "Add machines");
    setAttribute(button, "class", left > 0 || swarm.open_always ? "open" : "");
    setAttribute(
      button,
      "title",
      left > 0
        ? "Machines of this network that start shoal now join by themselves. Click for ten minutes more."
        : "Let machines of this network join by themselves for ten minutes",
    );
    button.disabled = swarm.open_always;
  };
  setInterval(countdown, 1000);

  button.addEventListener("click", async () => {
    try {
      const opened = await ask("POST", "/api/v1/open", { duration_s: OPEN_SECONDS });
      swarm = { ...swarm, open_until: opened.open_until };
      failure = null;
      setHidden(banner, true);
      countdown();
    } catch (error) {
      failure = error;
      setText(banner, [error.message, error.fix].filter(Boolean).join(" "));
      setHidden(banner, false);
    }
  });

  return {
    update: (next) => {
      swarm = next;
      document.title = `Shoal: ${swarm.swarm}`;
      const ready = swarm.nodes.filter((node) => node.state === "ready");
      const total = (field) => ready.reduce((sum, node) => sum + (node.memory[field] ?? 0), 0);
      const scheduler = swarm.scheduler ? nodeName(swarm, swarm.scheduler) : "none yet";
      facts(
        [
          { label: "Swarm", value: swarm.swarm, title: `group ${swarm.group}, number ${swarm.number}, term ${swarm.term}` },
          { label: "Scheduler", value: scheduler, title: swarm.scheduler },
          { label: "Nodes", value: String(ready.length), title: plural(swarm.nodes.length, "node is known", "nodes are known") },
          { label: "Memory", value: `${bytes(total("used_bytes"))} of ${bytes(total("offered_bytes"))}`, title: "used by models, of what the nodes offer" },
        ],
        (item) => item.label,
      );
      countdown();
    },
    connection: ({ live: fresh, since }) => {
      setText(live, fresh ? "live" : "stale");
      setAttribute(live, "class", fresh ? "pill good" : "pill bad");
      if (!fresh) setText(banner, `Stale since ${time(since)}: this node has not been heard from. What is shown may be out of date.`);
      setHidden(banner, fresh && !failure);
    },
  };
}
