// What connects the nodes, as a table: the twin of the picture.

import { byId, el, keyed, setAttribute, setHidden, setText } from "/app/dom.js";
import { keyOf } from "/app/feed.js";
import { bytes, micros, nodeName, plural, rate } from "/app/format.js";

export const KINDS = { loopback: "same machine", thunderbolt: "Thunderbolt", ethernet: "Ethernet", wifi: "Wi-Fi", virtual: "virtual" };
const CARRIERS = { tcp: "TCP", rdma: "RDMA", shared_memory: "shared memory" };
export const STATES = { probing: "warn", tcp: "good", upgrading: "warn", rdma: "good", degraded: "warn", down: "bad" };

// What the cables of a link are and have done.
function cable(rdma) {
  if (!rdma) return null;
  const devices = [rdma.a_device, rdma.b_device].filter(Boolean).join(" – ");
  const kind = rdma.queue_pairs ? ` (${rdma.queue_pairs.toUpperCase()})` : "";
  const trips = rdma.rtt_us && rdma.tcp_rtt_us ? `4 KB there and back: ${micros(rdma.rtt_us.p50)} over RDMA, ${micros(rdma.tcp_rtt_us.p50)} over TCP` : "";
  const sent = `${plural(rdma.messages, "message", "messages")}, ${bytes(rdma.bytes)}, ${rdma.resent} sent again`;
  const turns = `to RDMA ${rdma.upgrades} ×, back ${rdma.falls} ×`;
  const led = rdma.flows ? `${plural(rdma.flows, "connection", "connections")} led on: ${rdma.posted_on} messages as they came, ${rdma.copied} copied` : "";
  return [devices && `RDMA: ${devices}${kind}`, trips, sent, led, turns].filter(Boolean).join("; ");
}

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
      setAttribute(state, "title", cable(link.rdma));
      setText(reason, link.reason ?? "");
      setText(trip, micros(link.rtt_us?.p50));
      setAttribute(trip, "title", link.rtt_us ? `99 % under ${micros(link.rtt_us.p99)}${link.measured_over ? `, over ${CARRIERS[link.measured_over] ?? link.measured_over}` : ""}` : null);
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
