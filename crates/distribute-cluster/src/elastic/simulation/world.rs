//! Processes, their network and their clocks.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use distribute_testkit::simulation::Random;

use super::BOUND;
use super::invariants::Invariants;
use super::scenario::{Fault, Scenario};
use super::training::{Trained, Training};
use crate::elastic::core::{Action, Core, Event, Message, Settings};
use crate::elastic::generation::{Candidate, Generation};

/// The end of a scenario.
pub(super) struct Outcome {
    /// How long after the last fault all live processes were in one generation; `None` if too few were left for one.
    pub(super) settled: Option<Duration>,
    pub(super) generations: u64,
    pub(super) steps: u64,
    /// Generations that lacked the newest state.
    pub(super) outdated: usize,
}

/// A process.
pub(super) struct Node {
    pub(super) core: Core,
    pub(super) training: Training,
    address: String,
    pub(super) alive: bool,
    pub(super) frozen_until: u64,
    /// Thousandths of the true speed, and the time that its clock is ahead.
    speed: u64,
    ahead: u64,
    /// The number of the timer that counts.
    timer: u64,
    /// Events that arrived while it was frozen.
    inbox: Vec<Event>,
    /// Whether it has asked to leave, and whether that was granted.
    leaves: bool,
    left: bool,
}

pub(super) enum Item {
    Deliver {
        to: String,
        from: String,
        message: Message,
    },
    Timer {
        node: usize,
        timer: u64,
    },
    Wake {
        node: usize,
    },
    Fault(usize),
    /// A process looks whether it can continue its training.
    Train {
        node: usize,
    },
    /// Members find out which others are gone.
    Detect,
    /// The register does what it was asked for.
    Register {
        node: usize,
        ask: Option<Generation>,
    },
    Answer {
        node: usize,
        event: Event,
    },
}

pub(super) struct World<'a> {
    pub(super) scenario: &'a Scenario,
    pub(super) random: Random,
    pub(super) now: u64,
    sequence: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    items: HashMap<u64, Item>,
    pub(super) nodes: Vec<Node>,
    /// The process that an address belongs to now.
    at: HashMap<String, usize>,
    register: Option<Generation>,
    pub(super) invariants: Invariants,
    pub(super) trained: Trained,
    /// Messages of votes and decisions that were sent.
    votes: u64,
}

/// Between two looks for members that are gone.
const DETECT: u64 = 150_000;

impl<'a> World<'a> {
    pub(super) fn new(scenario: &'a Scenario) -> World<'a> {
        let mut world = World {
            scenario,
            random: Random::new(scenario.seed ^ 0x5eed),
            now: 0,
            sequence: 0,
            queue: BinaryHeap::new(),
            items: HashMap::new(),
            nodes: Vec::new(),
            at: HashMap::new(),
            register: None,
            invariants: Invariants::default(),
            trained: Trained::default(),
            votes: 0,
        };
        for place in 0..scenario.faults.len() {
            let at = match &scenario.faults[place] {
                Fault::Freeze { from, .. } => *from,
                Fault::Kill { at, .. } | Fault::Start { at, .. } | Fault::Suspect { at, .. } => *at,
                Fault::Leave { at, .. } => *at,
                _ => continue,
            };
            world.put(at, Item::Fault(place));
        }
        world.put(DETECT, Item::Detect);
        world
    }

    pub(super) fn run(mut self) -> Result<Outcome, String> {
        for place in 0..self.scenario.seeds {
            self.begin(format!("n{place}:1"), Some(place as u64))?;
        }
        let quiet = self.scenario.quiet();
        let end = quiet + BOUND.as_micros() as u64;
        let mut settled = None;
        let mut events = 0u64;
        while let Some(Reverse((at, key))) = self.queue.pop() {
            if at > end {
                break;
            }
            events += 1;
            if events > 2_000_000 {
                return Err("the processes do not come to rest".to_owned());
            }
            self.now = at;
            let Some(item) = self.items.remove(&key) else { continue };
            self.step(item)?;
            let active = self.nodes.iter().filter(|node| node.alive && node.core.is_active());
            self.invariants.one_side(active.map(|node| (node.core.own().identity, node.core.newest())))?;
            if at >= quiet {
                match self.is_settled() {
                    true => settled = settled.or(Some(at - quiet)),
                    false => settled = None,
                }
                // Nothing happens any more.
                if settled.is_some_and(|since| at - quiet > since + 3_000_000) {
                    break;
                }
            }
        }
        if settled.is_none() && self.can_settle() {
            let state: Vec<String> = self.nodes.iter().map(Node::describe).collect();
            return Err(format!(
                "no generation of all live processes {BOUND:?} after the last fault:\n{}",
                state.join("\n")
            ));
        }
        if settled.is_some() && !self.trains() {
            return Err(format!("{} does not train", self.nodes[0].core.newest()));
        }
        let (generations, steps) = (self.invariants.decided.len() as u64, self.steps());
        let outdated = self.trained.outdated.len();
        Ok(Outcome { settled: settled.map(Duration::from_micros), generations, steps, outdated })
    }

    pub(super) fn put(&mut self, at: u64, item: Item) {
        self.sequence += 1;
        self.items.insert(self.sequence, item);
        self.queue.push(Reverse((at, self.sequence)));
    }

    /// Starts a process.
    fn begin(&mut self, address: String, seat: Option<u64>) -> Result<(), String> {
        let node = self.nodes.len();
        let (answer_window, join_window) = (Duration::from_millis(500), Duration::from_millis(500));
        let settings = Settings {
            min: self.scenario.min,
            max: self.scenario.max,
            join_window,
            answer_window,
            join_timeout: Duration::from_secs(600),
            majority: self.scenario.majority,
            seeds: (0..self.scenario.seeds).map(|place| format!("n{place}:1")).collect(),
            seat,
        };
        let identity = (node as u128 + 1) << 64;
        if seat.is_some() {
            self.invariants.asks(identity);
        }
        let speed = if self.scenario.clocks { self.random.between(700, 1400) } else { 1000 };
        let ahead = self.random.between(0, 1_000_000_000);
        let own = Candidate { identity, control: address.clone(), service: format!("s{node}:2") };
        let local = Duration::from_micros(ahead + self.now * speed / 1000);
        let core = Core::new(settings, own, local);
        self.at.insert(address.clone(), node);
        let (timer, inbox, leaves, left) = (0, Vec::new(), false, false);
        let training = Training::new(node as u64);
        let (alive, frozen_until) = (true, 0);
        let node_of = Node { core, training, address, alive, frozen_until, speed, ahead, timer, inbox, leaves, left };
        self.nodes.push(node_of);
        self.put(self.now, Item::Train { node });
        self.handle(node, Event::Timer)
    }

    fn step(&mut self, item: Item) -> Result<(), String> {
        match item {
            Item::Deliver { to, from, message } => match self.at.get(&to) {
                Some(node) => self.handle(*node, Event::Message { from, message }),
                None => Ok(()),
            },
            Item::Timer { node, timer } if self.nodes[node].timer == timer => self.handle(node, Event::Timer),
            Item::Timer { .. } => Ok(()),
            Item::Wake { node } => {
                let inbox = std::mem::take(&mut self.nodes[node].inbox);
                inbox.into_iter().try_for_each(|event| self.handle(node, event))
            }
            Item::Fault(place) => self.fault(place),
            Item::Train { node } => self.train(node),
            Item::Detect => self.detect(),
            Item::Register { node, ask } => self.ask_register(node, ask),
            Item::Answer { node, event } => self.handle(node, event),
        }
    }

    fn fault(&mut self, place: usize) -> Result<(), String> {
        let nodes = self.nodes.len();
        match self.scenario.faults[place].clone() {
            Fault::Freeze { node, until, .. } if node < nodes => {
                self.freeze(node, until);
            }
            Fault::Kill { node, .. } if node < nodes => self.kill(node),
            Fault::Start { replaces, .. } => {
                let own = format!("n{}:1", nodes + 100);
                let address = match replaces {
                    // The one that has the address now must be gone.
                    Some(node) if node < nodes && !self.nodes[self.at[&self.nodes[node].address]].alive => {
                        self.nodes[node].address.clone()
                    }
                    _ => own,
                };
                self.begin(address, None)?;
            }
            Fault::Suspect { node, rank, .. } if node < nodes => {
                let generation = self.nodes[node].core.newest().number;
                self.handle(node, Event::Suspect { generation, ranks: vec![rank] })?;
            }
            Fault::Leave { node, .. } if node < nodes => {
                self.nodes[node].leaves = true;
                self.handle(node, Event::Leave)?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Stops a process for a while.
    pub(super) fn freeze(&mut self, node: usize, until: u64) {
        self.nodes[node].frozen_until = self.nodes[node].frozen_until.max(until);
        self.put(until, Item::Wake { node });
    }

    /// Gives an event to a process and does what it wants done.
    pub(super) fn handle(&mut self, node: usize, event: Event) -> Result<(), String> {
        let Node { alive, frozen_until, .. } = &self.nodes[node];
        if !alive {
            return Ok(());
        }
        if *frozen_until > self.now {
            self.nodes[node].inbox.push(event);
            return Ok(());
        }
        let Node { ahead, speed, .. } = self.nodes[node];
        let local = Duration::from_micros(ahead + self.now * speed / 1000);
        let before = self.nodes[node].core.newest().number;
        // Not after the event: a process that is removed is another one from then on.
        let identity = self.nodes[node].core.own().identity;
        let actions = self.nodes[node].core.handle(local, event);
        if self.nodes[node].core.newest().number < before {
            return Err(format!("{} went back", self.nodes[node].address));
        }
        for action in actions {
            self.act(node, identity, action)?;
            if !self.nodes[node].alive {
                break;
            }
        }
        Ok(())
    }

    fn act(&mut self, node: usize, identity: u128, action: Action) -> Result<(), String> {
        match action {
            Action::Send { to, message } => {
                self.invariants.sends(identity, &message)?;
                self.transmit(node, to, message);
            }
            Action::Timer(at) => {
                let Node { ahead, speed, timer, .. } = &mut self.nodes[node];
                *timer += 1;
                let at = at.as_nanos().div_ceil(1000) as u64;
                let at = (at.saturating_sub(*ahead) * 1000).div_ceil(*speed);
                let timer = *timer;
                self.put(at.max(self.now), Item::Timer { node, timer });
            }
            Action::ReadRegister => {
                let at = self.now + self.random.between(500, 20_000);
                self.put(at, Item::Register { node, ask: None });
            }
            Action::Decide(next) => {
                let at = self.now + self.random.between(500, 20_000);
                self.put(at, Item::Register { node, ask: Some(next) });
            }
            Action::Decided { generation, .. } => {
                self.invariants.decides(&generation, self.scenario.min, self.scenario.max)?;
                self.trained.is_known_to([&generation].into_iter())?;
            }
            Action::Left => self.nodes[node].left = true,
            Action::JobEnded => return Err(format!("{}: no job ends here", self.nodes[node].address)),
            Action::End(reason) => return Err(format!("{} gave up: {reason}", self.nodes[node].address)),
        }
        Ok(())
    }

    /// Kills a process. Some of the others see that its connections end.
    pub(super) fn kill(&mut self, node: usize) {
        self.nodes[node].alive = false;
        let address = self.nodes[node].address.clone();
        for other in 0..self.nodes.len() {
            if self.nodes[other].alive && !self.is_cut(node, other) && self.random.percent(50) {
                let at = self.now + self.random.between(100, 5_000);
                self.put(at, Item::Answer { node: other, event: Event::Closed { address: address.clone() } });
            }
        }
    }

    fn transmit(&mut self, node: usize, to: String, message: Message) {
        if matches!(message, Message::Accept { .. } | Message::Decided { .. } | Message::Whole(_)) {
            self.votes += 1;
            let votes = self.votes;
            let kills = |fault: &Fault| matches!(fault, Fault::KillAmid { message } if *message == votes);
            if self.scenario.faults.iter().any(kills) {
                return self.kill(node);
            }
            let stalls = self.scenario.faults.iter().find_map(|fault| match fault {
                Fault::StallAmid { message, pause } if *message == votes => Some(self.now + pause),
                _ => None,
            });
            if let Some(until) = stalls {
                self.freeze(node, until);
            }
        }
        if self.at.get(&to).is_none_or(|to| self.is_cut(node, *to)) {
            return;
        }
        // The system of a process that was killed says so, unless its machine is gone too.
        if !self.nodes[self.at[&to]].alive && self.random.percent(50) {
            let at = self.now + self.random.between(100, 5_000);
            let event = match self.random.percent(25) {
                true => Event::Unanswered { address: to },
                false => Event::Gone { address: to },
            };
            return self.put(at, Item::Answer { node, event });
        }
        let (now, mut copies, mut most) = (self.now, 1, 5_000);
        for fault in &self.scenario.faults {
            match fault {
                Fault::Loss { from, until, percent } if (*from..*until).contains(&now) => {
                    copies -= u64::from(self.random.percent(*percent) && copies > 0);
                }
                Fault::Twice { from, until, percent } if (*from..*until).contains(&now) => {
                    copies += u64::from(self.random.percent(*percent) && copies > 0);
                }
                Fault::Slow { from, until, most: slow } if (*from..*until).contains(&now) => most = most.max(*slow),
                _ => {}
            }
        }
        for _ in 0..copies {
            let at = now.max(self.nodes[node].frozen_until) + self.random.between(100, most);
            let from = self.nodes[node].address.clone();
            self.put(at, Item::Deliver { to: to.clone(), from, message: message.clone() });
        }
    }

    /// Returns whether nothing gets from one process to another now.
    fn is_cut(&self, from: usize, to: usize) -> bool {
        let inside = |side: u64, node: usize| side >> (node % 64) & 1 == 1;
        self.scenario.faults.iter().any(|fault| match fault {
            Fault::Partition { from: since, until, side, one_way } if (*since..*until).contains(&self.now) => {
                let (sends, takes) = (inside(*side, from), inside(*side, to));
                sends && !takes || !one_way && !sends && takes
            }
            Fault::Cut { from: since, until, sender, receiver } if (*since..*until).contains(&self.now) => {
                (*sender, *receiver) == (from, to)
            }
            _ => false,
        })
    }

    fn ask_register(&mut self, node: usize, ask: Option<Generation>) -> Result<(), String> {
        let now = self.now;
        let fails = |fault: &Fault| matches!(fault, Fault::Register { from, until } if (*from..*until).contains(&now));
        let fails = self.scenario.faults.iter().any(fails);
        let does = !fails || self.random.percent(50);
        let is_decision = ask.is_some();
        if let Some(next) = ask.filter(|_| does) {
            let held = self.register.as_ref().map_or(0, |held| held.number);
            if next.number == held + 1 {
                self.invariants.decides(&Arc::new(next.clone()), self.scenario.min, self.scenario.max)?;
                self.register = Some(next);
            }
        }
        let answer = match fails {
            true => Err("it does not answer".to_owned()),
            false => Ok(self.register.clone()),
        };
        let event = match (is_decision, answer) {
            (false, read) => Event::Read(read),
            (true, Ok(Some(generation))) => Event::Registered(Ok(generation)),
            (true, Ok(None)) => Event::Registered(Err("it lost what was decided".to_owned())),
            (true, Err(problem)) => Event::Registered(Err(problem)),
        };
        let at = now + self.random.between(500, if fails { 300_000 } else { 20_000 });
        self.put(at, Item::Answer { node, event });
        Ok(())
    }

    /// Stands for the coordination of a generation: members notice soon that others are gone, frozen, not reached, or
    /// in a later generation.
    fn detect(&mut self) -> Result<(), String> {
        self.put(self.now + DETECT, Item::Detect);
        for node in 0..self.nodes.len() {
            let Node { core, alive, frozen_until, .. } = &self.nodes[node];
            if !alive || *frozen_until > self.now || !core.is_active() || self.random.percent(30) {
                continue;
            }
            let generation = self.nodes[node].core.newest().clone();
            let (mut over, mut ranks) = (false, Vec::new());
            for (rank, member) in (0..).zip(&generation.members) {
                let Some(other) = self.at.get(&member.control).copied() else { continue };
                let peer = &self.nodes[other];
                let later = peer.core.newest().number > generation.number;
                let is_it = peer.core.own().identity == member.identity;
                let cut = self.is_cut(node, other) || self.is_cut(other, node);
                if !peer.alive || (!is_it && !later) || peer.left || peer.frozen_until > self.now || cut {
                    ranks.push(rank);
                } else if later {
                    over = true;
                }
            }
            if over || !ranks.is_empty() {
                self.handle(node, Event::Suspect { generation: generation.number, ranks })?;
            }
        }
        Ok(())
    }

    fn live(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|node| node.alive && !node.left && self.finds_others(node))
    }

    /// Returns whether a process that is to join can find a member: by the seeds, by members that it knows, and by what
    /// those know that it finds there.
    fn finds_others(&self, node: &Node) -> bool {
        let newest = self.invariants.decided.last_key_value().map_or(0, |(number, _)| *number);
        if newest == 0 || !self.scenario.majority || node.core.newest().number == newest {
            return true;
        }
        let known = |node: &Node| -> Vec<String> {
            node.core.newest().members.iter().map(|member| member.control.clone()).collect()
        };
        let mut contacts: Vec<String> = (0..self.scenario.seeds).map(|place| format!("n{place}:1")).collect();
        contacts.extend(known(node));
        let mut place = 0;
        while let Some(contact) = contacts.get(place) {
            place += 1;
            let Some(other) = self.at.get(contact).map(|other| &self.nodes[*other]).filter(|other| other.alive) else {
                continue;
            };
            if other.core.newest().number + 1 >= newest && !other.left && other.core.is_member() {
                return true;
            }
            let mut more = known(other);
            more.retain(|contact| !contacts.contains(contact));
            contacts.extend(more);
        }
        false
    }

    /// Returns whether all live processes are active in the newest generation, as many as it may have.
    fn is_settled(&self) -> bool {
        let Some((number, newest)) = self.invariants.decided.last_key_value() else { return false };
        let active = self.live().filter(|node| node.core.is_active() && node.core.newest().number == *number).count();
        active == newest.members.len() && active == self.live().count().min(self.scenario.max)
    }

    /// Returns whether enough processes are left for a generation after the newest.
    fn can_settle(&self) -> bool {
        let enough = self.live().filter(|node| !node.leaves).count() >= self.scenario.min;
        // One that was decided and that no live process has learned is not of use, except to a register's readers.
        let known = self.live().map(|node| node.core.newest()).max_by_key(|newest| newest.number);
        let held = self.register.as_ref().map(|held| Arc::new(held.clone()));
        let newest = held.or_else(|| known.cloned()).filter(|newest| newest.number > 0);
        let there = |identity: u128| self.live().any(|node| node.core.own().identity == identity);
        match newest {
            Some(newest) => {
                let left = newest.members.iter().filter(|member| there(member.identity)).count();
                let quorum = if self.scenario.majority { newest.majority() } else { 1 };
                enough && left >= quorum
            }
            None => {
                // Those that began as seeds, whether or not they found each other.
                let seeds = (0..self.scenario.seeds).filter(|node| self.nodes[*node].alive && !self.nodes[*node].left);
                let quorum = if self.scenario.majority { self.scenario.seeds / 2 + 1 } else { 1 };
                enough && seeds.count() >= quorum
            }
        }
    }
}

impl Node {
    fn describe(&self) -> String {
        let Node { core, address, alive, left, .. } = self;
        let own = core.own().identity;
        format!("{address} {own:x} alive {alive} left {left} active {} {}", core.is_active(), core.newest())
    }
}
