// The swarm's document, kept up to date from /api/v1/events: a snapshot, then deltas, and beats in between. When
// the beats stop, what is shown is stale and the page says since when.

const KEYED = {
  nodes: ["id"],
  links: ["a", "b", "kind", "a_address", "b_address"],
  instances: ["id"],
  downloads: ["node", "model"],
  refused: ["id"],
};

// Three beats of two seconds may be missed.
const STALE_MS = 7000;
// A browser gives up on a stream that was refused; we do not.
const RETRY_MS = 3000;

export const keyOf = (list, element) => KEYED[list].map((field) => element[field] ?? "").join(" ");

// Brings `swarm` from the delta's version `from` to its `seq`.
export function apply(swarm, delta) {
  const next = { ...swarm, ...delta.set };
  for (const [list, changes] of Object.entries(delta.lists)) {
    const gone = new Set(changes.gone);
    const set = new Map(changes.set.map((element) => [keyOf(list, element), element]));
    const kept = swarm[list].filter((element) => !gone.has(keyOf(list, element)));
    const replaced = kept.map((element) => {
      const key = keyOf(list, element);
      const changed = set.get(key);
      set.delete(key);
      return changed ?? element;
    });
    next[list] = [...replaced, ...set.values()];
  }
  return next;
}

// Calls `onSwarm` with each version and `onState` with {live, since} when the connection comes or goes. The swarm
// has one more field: `clock_ms`, what the node's clock is ahead of the browser's.
export function follow({ onSwarm, onState }) {
  let swarm = null;
  let heard = Date.now();
  let live = false;

  const alive = () => {
    heard = Date.now();
    if (!live) onState({ live: true });
    live = true;
  };
  const show = (next) => {
    swarm = { ...next, clock_ms: Date.parse(next.time) - Date.now() };
    onSwarm(swarm);
  };

  const connect = () => {
    const source = new EventSource("/api/v1/events");
    source.addEventListener("snapshot", (event) => { alive(); show(JSON.parse(event.data)); });
    source.addEventListener("delta", (event) => {
      alive();
      const delta = JSON.parse(event.data);
      if (swarm && swarm.seq === delta.from) {
        show(apply(swarm, delta));
      } else {
        // Cannot happen unless an event was lost: start again from a snapshot.
        source.close();
        connect();
      }
    });
    source.addEventListener("beat", alive);
    source.addEventListener("error", () => {
      if (source.readyState === EventSource.CLOSED) setTimeout(connect, RETRY_MS);
    });
  };

  connect();
  setInterval(() => {
    if (Date.now() - heard < STALE_MS) return;
    live = false;
    onState({ live: false, since: heard });
  }, 1000);
}
