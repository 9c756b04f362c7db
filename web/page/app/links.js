// What connects the nodes, as a table: the twin of the picture.

import { byId, el, keyed, setAttribute, setHidden, setText } from "/app/dom.js";
import { keyOf } from "/app/feed.js";
import { micros, nodeName, rate } from "/app/format.js";

export const KINDS = { loopback: "same machine", thunderbolt: "Thunderbolt", ethernet: "Ethernet", wifi: "Wi-Fi", virtual: "virtual" };
export const STATES = { probing: "warn", tcp: "good", upgrading: "warn", rdma: "good", degraded: "warn", down: "bad" };

function row() {
  const between = el("th", { scope: "row" });
  const kind = el("td");
  const state = el("span", { class: "pill" });
  const reason = el("span", { class: "quiet" });
  const trip = el("td", { class: "num" });
  const bandwidth = el("td", { class: "num" });
  const protection = el("td");
  const root = el("tr", null, between, kind, el("td", { class: "words" }, state, " ", reason), trip, bandwidth, protection);
  return {
    root,
    update: ({ link, swarm }) => {
      setText(between, `${nodeName(swarm, link.a)} – ${nodeName(swarm, link.b)}`);
      setText(kind, KINDS[link.kind] ?? link.kind);
      setText(state, link.state === "tcp" || link.state === "rdma" ? link.state.toUpperCase() : link.state);
      setAttribute(state, "class", `pill ${STATES[link.state] ?? ""}`);
      setText(reason, link.reason ?? "");
      setText(trip, micros(link.rtt_us?.p50));
      setAttribute(trip, "title", link.rtt_us ? `99 % under ${micros(link.rtt_us.p99)}` : null);
      setText(bandwidth, rate(link.bytes_per_s));
      setText(protection, link.encrypted === null ? "–" : link.encrypted ? "encrypted" : "plain, checked");
    },
  };
}

export function links() {
  const card = byId("links-card");
  const rows = keyed(byId("links"), row);
  return (swarm) => {
    setHidden(card, swarm.links.length === 0);
    rows(swarm.links.map((link) => ({ link, swarm })), ({ link }) => keyOf("links", link));
  };
}
