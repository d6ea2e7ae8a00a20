//! Costs of decisions by the number of members: messages and time, on a network without faults.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::Duration;

use crate::elastic::core::{Action, Core, Event, Message, Settings};
use crate::elastic::generation::Candidate;

/// How long a message takes.
const LATENCY: Duration = Duration::from_millis(1);

/// Processes on a network without faults. Process i is at address "n{i}:1".
struct Network {
    nodes: Vec<Option<Core>>,
    places: HashMap<String, usize>,
    seeds: Vec<String>,
    max: usize,
    now: Duration,
    queue: BinaryHeap<Reverse<(Duration, u64)>>,
    items: HashMap<u64, (usize, Event)>,
    /// The item that is the timer of each process.
    timers: Vec<u64>,
    sequence: u64,
    messages: u64,
    /// A process that dies when it is told a decision, and one that dies once it has told one to another.
    dies: [Option<usize>; 2],
}

/// The costs of a decision.
#[derive(Debug)]
struct Cost {
    messages: u64,
    time: Duration,
}

impl Network {
    /// Starts seeds.
    fn new(size: usize, max: usize) -> Network {
        let seeds = (0..size).map(|place| format!("n{place}:1")).collect();
        let mut network = Network {
            nodes: Vec::new(),
            places: HashMap::new(),
            seeds,
            max,
            now: Duration::ZERO,
            queue: BinaryHeap::new(),
            items: HashMap::new(),
            timers: Vec::new(),
            sequence: 0,
            messages: 0,
            dies: [None; 2],
        };
        (0..size).for_each(|place| network.begin(Some(place as u64)));
        network
    }

    fn begin(&mut self, seat: Option<u64>) {
        let place = self.nodes.len();
        let control = format!("n{place}:1");
        let settings = Settings {
            min: 1,
            max: self.max,
            join_window: Duration::from_millis(500),
            answer_window: Duration::from_millis(500),
            join_timeout: Duration::from_secs(60),
            majority: true,
            seeds: self.seeds.clone(),
            seat,
        };
        let own =
            Candidate { identity: (place as u128 + 1) << 64, control: control.clone(), service: "s:1".to_owned() };
        self.places.insert(control, place);
        self.nodes.push(Some(Core::new(settings, own, self.now)));
        self.timers.push(0);
        self.put(self.now, place, Event::Timer);
    }

    fn put(&mut self, at: Duration, place: usize, event: Event) -> u64 {
        self.sequence += 1;
        self.items.insert(self.sequence, (place, event));
        self.queue.push(Reverse((at, self.sequence)));
        self.sequence
    }

    /// Runs until all live processes are active in the generation with this number; returns what that cost.
    fn until(&mut self, number: u64) -> Cost {
        let (before, since) = (self.messages, self.now);
        let is_there =
            |node: &Option<Core>| node.as_ref().is_none_or(|core| core.newest().number == number && core.is_active());
        let mut waits = self.nodes.iter().filter(|node| !is_there(node)).count();
        while waits > 0 {
            let Reverse((at, key)) = self.queue.pop().expect("something happens until all are there");
            self.now = at;
            let Some((place, event)) = self.items.remove(&key) else { continue };
            if matches!(event, Event::Timer) && self.timers[place] > key {
                continue;
            }
            let Some(core) = &mut self.nodes[place] else { continue };
            let address = core.own().control.clone();
            let actions = core.handle(at, event);
            for action in actions {
                match action {
                    // It died at an earlier one of these actions.
                    _ if self.nodes[place].is_none() => {}
                    Action::Send { to, message } => {
                        self.messages += 1;
                        let receiver = self.places.get(&to).copied();
                        let [told, teller] = &mut self.dies;
                        let dies = match message {
                            Message::Whole(_) => {
                                told.take_if(|dies| Some(*dies) == receiver).or(teller.take_if(|dies| *dies == place))
                            }
                            _ => None,
                        };
                        if let Some(dies) = dies {
                            self.nodes[dies] = None;
                            waits -= 1;
                        }
                        if let Some(to) = self.places.get(&to).copied() {
                            let event = Event::Message { from: address.clone(), message };
                            self.put(at + LATENCY, to, event);
                        }
                    }
                    Action::Timer(at) => self.timers[place] = self.put(at.max(self.now), place, Event::Timer),
                    Action::Decided { generation, is_member } => {
                        waits -= usize::from(generation.number == number && is_member);
                    }
                    Action::JobEnded => panic!("{address}: no job ends here"),
                    Action::End(reason) => panic!("{address}: {reason}"),
                    Action::ReadRegister | Action::Decide(_) | Action::Left => {}
                }
            }
        }
        Cost { messages: self.messages - before, time: self.now - since }
    }

    /// Kills a process; all others notice it at once.
    fn lose(&mut self, lost: usize) {
        self.nodes[lost] = None;
        for place in 0..self.nodes.len() {
            let Some(core) = &self.nodes[place] else { continue };
            let generation = core.newest().number;
            let rank = core.newest().members.iter().position(|member| member.control == format!("n{lost}:1"));
            let ranks = rank.map(|rank| rank as u32).into_iter().collect();
            self.put(self.now, place, Event::Suspect { generation, ranks });
        }
    }
}

/// Prints a row for each size, and returns the messages of each decision by member.
fn costs(sizes: &[usize]) -> Vec<[f64; 4]> {
    println!("| members | first | a member is lost | the leader is lost | one joins |\n|--:|--:|--:|--:|--:|");
    let row = |size: &usize| {
        let mut network = Network::new(*size, *size);
        let first = network.until(1);
        network.lose(size - 1);
        let member = network.until(2);
        network.lose(0);
        let leader = network.until(3);
        network.begin(None);
        let joins = network.until(4);
        let costs = [first, member, leader, joins];
        let cell = |cost: &Cost| format!("{} in {} ms", cost.messages, cost.time.as_millis());
        println!("| {size} | {} |", costs.iter().map(cell).collect::<Vec<_>>().join(" | "));
        costs.map(|cost| cost.messages as f64 / *size as f64)
    };
    sizes.iter().map(row).collect()
}

#[test]
fn members_that_die_amid_a_decision_are_missed_without_a_suspicion() {
    for dies in [[Some(2), None], [None, Some(0)]] {
        let mut network = Network::new(3, 3);
        network.dies = dies;
        let cost = network.until(2);
        assert!(cost.time < Duration::from_secs(10), "{dies:?}: {cost:?}");
        let members = network.nodes[1].as_ref().map(|core| core.newest().members.len());
        assert_eq!(members, Some(2), "{dies:?}");
    }
}

#[test]
fn messages_grow_with_the_members_and_not_faster() {
    let costs = costs(&[16, 256]);
    // A question, an answer, a vote that is asked for and given, the decision and its acknowledgement; members that
    // propose at the same time add some.
    assert!(costs.iter().flatten().all(|by_member| *by_member < 12.0), "{costs:?}");
}

#[test]
#[ignore = "4,096 members take long without optimisation"]
fn costs_of_4096_members() {
    let costs = costs(&[16, 256, 4096]);
    assert!(costs.iter().flatten().all(|by_member| *by_member < 12.0), "{costs:?}");
}
