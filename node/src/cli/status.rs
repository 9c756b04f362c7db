//! `shoal status`: who is there, and what runs where.

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use shoal_web::api::{
    Instance, InstanceState, KvType, LinkKind, LinkState, NodeRole, NodeState, Percentiles, QueuePairs,
    Swarm, Timestamp,
};

use super::{print_json, print_lines};
use crate::client::wait::node_name;
use crate::client::{Agent, AgentArgs};
use crate::options::{show_bytes, show_span};
use crate::terminal::{Paint, Table, printable, short_id, show_layers};

const EXAMPLES: &str = "\
Examples:
  shoal status                  once
  shoal status --watch          again at each change, until Ctrl-C
  shoal status --json           the whole document, for scripts
  shoal status --watch --json   one document a line, at each change";

/// Clears the terminal and goes to its first cell.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// Show the swarm: nodes, scheduler, instances with their layers, links, downloads
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Status {
    /// Show it again at each change
    #[arg(long)]
    watch: bool,
    /// Say it as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    agent: AgentArgs,
}

impl Status {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        let agent = Agent::find(&self.agent)?;
        if !self.watch {
            self.show(&agent.swarm().await?)?;
            return Ok(ExitCode::SUCCESS);
        }
        let mut changes = agent.changes().await?;
        let mut shown = None;
        loop {
            let swarm = changes.next().await?;
            if shown == Some(swarm.seq) {
                continue;
            }
            shown = Some(swarm.seq);
            if !self.json && io::stdout().is_terminal() {
                print_lines([CLEAR])?;
            }
            self.show(&swarm)?;
        }
    }

    fn show(&self, swarm: &Swarm) -> anyhow::Result<()> {
        if self.json { print_json(swarm) } else { print_lines(lines(swarm, Paint::stdout())) }
    }
}

fn lines(swarm: &Swarm, paint: Paint) -> Vec<String> {
    let scheduler = match &swarm.scheduler {
        Some(id) => format!("scheduler {}", paint.green(printable(node_name(swarm, id)))),
        None => paint.yellow("no scheduler yet"),
    };
    let mut lines = vec![format!(
        "{} {} of {} nodes ready, {scheduler}, number {} term {}",
        paint.bold(format!("swarm {}:", swarm.swarm)),
        swarm.nodes.iter().filter(|node| node.state == NodeState::Ready).count(),
        swarm.nodes.len(),
        swarm.number,
        swarm.term
    )];
    if swarm.open_always {
        lines.push(paint.red("open to anybody on this network, for as long as it runs (--open)"));
    } else if let Some(until) = swarm.open_until.filter(|until| *until > swarm.time) {
        let left = show_span(until.since(swarm.time));
        lines.push(paint.yellow(format!("open to machines on this network for {left} more")));
    }
    lines.push(String::new());
    lines.extend(nodes(swarm));
    lines.push(String::new());
    lines.extend(instances(swarm, paint));
    lines.extend(downloads(swarm));
    lines.extend(links(swarm));
    lines.extend(refused(swarm));
    lines
}

fn nodes(swarm: &Swarm) -> Vec<String> {
    let mut table = Table::new(["NODE", "ID", "STATE", "ROLE", "OFFERS", "USED", "THREADS", "SEEN", "HTTP"]);
    let unknown = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    for node in &swarm.nodes {
        let own = if node.id == swarm.own { " (here)" } else { "" };
        let seen = node.last_seen_ms.map(|ms| match ms {
            0 => "now".to_owned(),
            ms => format!("{} ago", show_span(Duration::from_millis(ms))),
        });
        table.row([
            printable(&node.name) + own,
            short_id(&node.id).to_owned(),
            state_of_node(node.state).to_owned(),
            node.role.map_or("-", role).to_owned(),
            unknown(node.memory.offered_bytes.map(show_bytes)),
            unknown(node.memory.used_bytes.map(show_bytes)),
            unknown(node.threads.map(|threads| threads.to_string())),
            unknown(seen),
            unknown(node.http.as_deref().map(printable)),
        ]);
    }
    let mut lines = table.lines("");
    let ailing = swarm.nodes.iter().filter_map(|node| Some((node, node.reason.as_ref()?)));
    lines.extend(ailing.map(|(node, reason)| format!("  {}: {}", printable(&node.name), printable(reason))));
    lines
}

fn instances(swarm: &Swarm, paint: Paint) -> Vec<String> {
    if swarm.instances.is_empty() {
        return vec!["nothing is served; `shoal serve smollm2-135m` starts a model".to_owned()];
    }
    let mut lines = Vec::new();
    for instance in &swarm.instances {
        let state = match instance.state {
            InstanceState::Ready => paint.green("ready"),
            InstanceState::Placing => paint.yellow("placing"),
            InstanceState::Loading => paint.yellow("loading"),
            InstanceState::Stopping => paint.yellow("stopping"),
            InstanceState::Failed => paint.red("failed"),
        };
        let context = instance.context.map_or("?".to_owned(), |context| context.to_string());
        let mut line = format!("{}: {state}, context {context} x {} slots", instance.id, instance.slots);
        if instance.kv.kv_type != KvType::F16 {
            line.push_str(&format!(", cache {}", instance.kv.kv_type));
        }
        if let (Some(active), Some(queued)) = (instance.active, instance.queued) {
            line.push_str(&format!(", {active} active, {queued} queued"));
        }
        let (predicted, seen) = (instance.predicted_tokens_per_s, instance.seen_tokens_per_s);
        line.push_str(&match (seen, predicted) {
            (Some(seen), Some(predicted)) => {
                format!(", {seen:.1} tokens/s for one request (predicted: {predicted:.1})")
            }
            (Some(seen), None) => format!(", {seen:.1} tokens/s for one request"),
            (None, Some(predicted)) => format!(", predicted: {predicted:.1} tokens/s for one request"),
            (None, None) => String::new(),
        });
        lines.push(line);
        if !instance.stages.is_empty() {
            lines.push(format!("  {}", stages_text(swarm, instance)));
        }
        for route in &instance.routes {
            let name = |node: &String| printable(node_name(swarm, node));
            let over: Vec<String> = route.over.iter().map(name).collect();
            lines.push(format!("  {} to {} over {}", name(&route.from), name(&route.to), over.join(", ")));
        }
        if let Some(reason) = &instance.reason {
            lines.push(format!("  {}", paint.red(printable(&reason.message))));
            lines.extend(reason.fix.iter().map(|fix| format!("  {}", printable(fix))));
        }
        for node in instance.why_not.iter().flat_map(|why| &why.nodes) {
            lines.push(format!("  {}", printable(&node.text)));
        }
    }
    lines
}

/// Which node has which layers: `node-1 layers 0-11, node-2 layers 12-29`.
pub(super) fn stages_text(swarm: &Swarm, instance: &Instance) -> String {
    let stage = |stage: &shoal_web::api::Stage| {
        let ranks: Vec<String> =
            stage.ranks.iter().map(|rank| printable(node_name(swarm, &rank.node))).collect();
        format!("{} {}", ranks.join("+"), show_layers(stage.layers))
    };
    instance.stages.iter().map(stage).collect::<Vec<_>>().join(", ")
}

fn downloads(swarm: &Swarm) -> Vec<String> {
    let line = |download: &shoal_web::api::Download| {
        let total = download.total_bytes.map_or("?".to_owned(), show_bytes);
        let left = download.eta_ms.map(|ms| format!(", {} left", show_span(Duration::from_millis(ms))));
        format!(
            "download of {} to {}: {} of {total} from {}{}",
            download.model,
            printable(node_name(swarm, &download.node)),
            show_bytes(download.done_bytes),
            printable(&download.source),
            left.unwrap_or_default()
        )
    };
    swarm.downloads.iter().map(line).collect()
}

fn links(swarm: &Swarm) -> Vec<String> {
    let far = swarm.nodes.iter().filter(|node| node.route.as_ref().is_some_and(|route| !route.is_empty()));
    let mut over: Vec<String> = Vec::new();
    for node in far {
        let between =
            node.route.iter().flatten().map(|id| printable(node_name(swarm, id))).collect::<Vec<_>>();
        over.push(format!("{} is reached over {}", printable(&node.name), between.join(", ")));
    }
    if swarm.links.is_empty() {
        return over;
    }
    let mut table =
        Table::new(["LINK", "", "KIND", "STATE", "RTT", "P99", "BYTES/S", "ENCRYPTED", "SINCE", "REASON"]);
    for link in &swarm.links {
        let us = |us: Option<f64>| us.map_or("-".to_owned(), |us| format!("{us:.0} us"));
        let end = |node: &str, interface: &Option<String>| {
            let interface = interface.as_deref().map(|name| format!(":{}", printable(name)));
            printable(node_name(swarm, node)) + interface.as_deref().unwrap_or_default()
        };
        let since = link.since.map(|since| format!("{} ago", show_span(swarm.time.since(since))));
        let encrypted = link.encrypted.map_or("-", |yes| if yes { "yes" } else { "no" });
        table.row([
            end(&link.a, &link.a_interface),
            end(&link.b, &link.b_interface),
            kind_of_link(link.kind).to_owned(),
            state_of_link(link.state).to_owned(),
            us(link.rtt_us.map(|rtt| rtt.p50)),
            us(link.rtt_us.and_then(|rtt| rtt.p99)),
            link.bytes_per_s.map_or("-".to_owned(), show_bytes),
            encrypted.to_owned(),
            since.unwrap_or_else(|| "-".to_owned()),
            link.reason.as_deref().map_or("-".to_owned(), printable),
        ]);
    }
    let mut lines = vec![String::new()];
    lines.extend(table.lines(""));
    lines.extend(over);
    let cables = cables(swarm);
    if !cables.is_empty() {
        lines.push(String::new());
        lines.extend(cables);
    }
    lines
}

/// What the links' cables of queue pairs have done.
fn cables(swarm: &Swarm) -> Vec<String> {
    let trip = |of: Option<Percentiles>| {
        of.map_or("-".to_owned(), |of| match of.p99 {
            Some(p99) => format!("{:.0}/{p99:.0} us", of.p50),
            None => format!("{:.0} us", of.p50),
        })
    };
    let mut table = Table::new([
        "RDMA",
        "",
        "QUEUE PAIRS",
        "4 KB P50/P99",
        "TCP",
        "MESSAGES",
        "BYTES",
        "RESENT",
        "LED ON",
        "AS CAME",
        "COPIED",
        "UP",
        "BACK",
    ]);
    let mut any = false;
    for (link, cable) in swarm.links.iter().filter_map(|link| Some((link, link.rdma.as_ref()?))) {
        any = true;
        let end = |node: &str, device: &Option<String>| {
            let device = device.as_deref().map(|name| format!(":{}", printable(name)));
            printable(node_name(swarm, node)) + device.as_deref().unwrap_or_default()
        };
        let kind = cable.queue_pairs.map_or("-", |kind| match kind {
            QueuePairs::Rc => "RC",
            QueuePairs::Uc => "UC",
        });
        table.row([
            end(&link.a, &cable.a_device),
            end(&link.b, &cable.b_device),
            kind.to_owned(),
            trip(cable.rtt_us),
            trip(cable.tcp_rtt_us),
            cable.messages.to_string(),
            show_bytes(cable.bytes),
            cable.resent.to_string(),
            cable.flows.to_string(),
            cable.posted_on.to_string(),
            cable.copied.to_string(),
            cable.upgrades.to_string(),
            cable.falls.to_string(),
        ]);
    }
    if any { table.lines("") } else { Vec::new() }
}

fn refused(swarm: &Swarm) -> Vec<String> {
    let line = |refused: &shoal_web::api::Refused| {
        let name = refused.name.as_deref().map_or_else(|| short_id(&refused.id).to_owned(), printable);
        let ago = show_span(Timestamp::now().since(refused.time));
        format!("refused {name} {ago} ago: {}", printable(&refused.text))
    };
    swarm.refused.iter().map(line).collect()
}

fn state_of_node(state: NodeState) -> &'static str {
    match state {
        NodeState::Joining => "joining",
        NodeState::Ready => "ready",
        NodeState::Draining => "draining",
        NodeState::Suspect => "suspect",
        NodeState::Gone => "gone",
    }
}

fn role(role: NodeRole) -> &'static str {
    match role {
        NodeRole::Scheduler => "scheduler",
        NodeRole::Voter => "voter",
        NodeRole::Learner => "learner",
    }
}

fn kind_of_link(kind: LinkKind) -> &'static str {
    match kind {
        LinkKind::Loopback => "loopback",
        LinkKind::Thunderbolt => "thunderbolt",
        LinkKind::Ethernet => "ethernet",
        LinkKind::Wifi => "wifi",
        LinkKind::Virtual => "virtual",
    }
}

fn state_of_link(state: LinkState) -> &'static str {
    match state {
        LinkState::Probing => "probing",
        LinkState::Tcp => "tcp",
        LinkState::Upgrading => "upgrading",
        LinkState::Rdma => "rdma",
        LinkState::Degraded => "degraded",
        LinkState::Down => "down",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_have_their_reasons_and_cables_their_counts() {
        let golden = include_str!("../../../web/tests/front/swarm.json");
        let swarm: Swarm = serde_json::from_str(golden).unwrap();
        let lines = links(&swarm).join("\n");
        assert!(lines.contains("RDMA is off on studio"), "{lines}");
        let cable = lines.lines().find(|line| line.contains("rdma_en5")).unwrap();
        for word in ["rdma_en6", "UC", "12/19 us", "58/95 us", "48210", "431 MB"] {
            assert!(cable.contains(word), "{word}: {cable}");
        }
    }
}
