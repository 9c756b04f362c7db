// The dashboard of a Shoal node. Everything it shows comes from one stream of events (feed.js); each part below
// keeps its own elements and changes only what differs. Text of models and machines is only ever set as text.

import { chat } from "/app/chat.js";
import { claim } from "/app/colours.js";
import { downloads } from "/app/downloads.js";
import { follow } from "/app/feed.js";
import { header } from "/app/header.js";
import { instances } from "/app/instances.js";
import { links } from "/app/links.js";
import { nodes } from "/app/nodes.js";
import { picture } from "/app/picture.js";
import { serve } from "/app/serve.js";
import { views } from "/app/views.js";

const showView = views();
const talk = chat();
const head = header();
const parts = [
  head.update,
  picture(),
  instances({ onChat: (model) => { showView("chat"); talk.choose(model); } }),
  downloads(),
  nodes(),
  links(),
  serve(),
  talk.update,
];

follow({
  onSwarm: (swarm) => {
    claim(swarm.nodes);
    for (const update of parts) update(swarm);
  },
  onState: head.connection,
});
