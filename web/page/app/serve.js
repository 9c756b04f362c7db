// The form that asks for a model to be served, and shows beforehand where it would go.

import { ask } from "/app/api.js";
import { byId, el, options, setHidden } from "/app/dom.js";
import { bytes, count, layers, nodeName } from "/app/format.js";
import { whyNot } from "/app/parts.js";

function label(model) {
  const words = [model.size_bytes === null ? null : bytes(model.size_bytes), model.state === "present" ? "on this disk" : model.state === "downloading" ? "on its way" : "to be downloaded"];
  return `${model.id} (${words.filter(Boolean).join(", ")})`;
}

export function serve() {
  const toggle = byId("serve-toggle");
  const form = byId("serve");
  const select = byId("serve-model");
  const answer = byId("serve-answer");
  let swarm = null;

  const say = (...children) => answer.replaceChildren(...children.flat().filter(Boolean));
  const fail = (error) => say(el("p", { class: "note bad", text: [error.message, error.fix].filter(Boolean).join(" ") }));

  const open = async (wanted) => {
    setHidden(form, !wanted);
    toggle.setAttribute("aria-expanded", String(wanted));
    if (!wanted) return;
    try {
      const { models } = await ask("GET", "/api/v1/models");
      options(select, models.map((model) => ({ value: model.id, label: label(model) })));
      if (models.length === 0) say(el("p", { class: "note", text: "No model is known. Add one with: shoal models add PATH" }));
    } catch (error) {
      fail(error);
    }
  };
  toggle.addEventListener("click", () => open(form.hidden));

  const request = () => {
    const data = new FormData(form);
    const context = Number(data.get("context"));
    return { model: data.get("model"), context: context > 0 ? context : null, parallel: data.get("parallel") };
  };

  const plan = async () => {
    try {
      const found = await ask("POST", "/api/v1/plan", request());
      if (!found.fits) {
        say(el("p", { class: "note bad", text: "It does not fit." }), whyNot(found));
        return;
      }
      const stages = found.stages.map((stage) => {
        const names = stage.ranks.map((rank) => nodeName(swarm, rank.node)).join(", ");
        const memory = stage.ranks.reduce((sum, rank) => sum + rank.weights_bytes + rank.kv_bytes + rank.scratch_bytes, 0);
        return el("li", { text: `${names}: ${layers(stage.layers)}, ${bytes(memory)}` });
      });
      say(el("p", { class: "note good", text: `It fits, with a context of ${count(found.context)}.` }), el("ul", { class: "plain" }, stages));
    } catch (error) {
      fail(error);
    }
  };
  byId("serve-plan").addEventListener("click", plan);

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      const { instance } = await ask("POST", "/api/v1/instances", request());
      say(el("p", { class: "note good", text: `${instance} is on its way.` }));
    } catch (error) {
      fail(error);
    }
  });

  return (next) => {
    swarm = next;
    const able = swarm.nodes.filter((node) => node.state === "ready" && node.memory.offered_bytes !== 0).length;
    const splits = [{ value: "auto", label: "automatic" }];
    for (let stages = 1; stages <= Math.min(able, 16); stages += 1) {
      splits.push({ value: `pipeline=${stages}`, label: stages === 1 ? "one node" : `over ${stages} nodes` });
    }
    options(byId("serve-parallel"), splits);
  };
}
