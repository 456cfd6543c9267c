//! What must be true of every scenario, from what the ranks wrote down.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use nix::sys::signal::Signal;
use sft_sync::Operation;

use crate::model;
use crate::record::{Moment, Outcome, OutcomeKind, Record};
use crate::reference::References;
use crate::scenario::{Kind, Meeting, Planned, Scenario};

/// What a call may take beyond its deadline.
const BEYOND_MS: f64 = 2000.0;
/// What a process may take to end once its training function has returned.
const EXIT_MS: f64 = 8000.0;
/// What a rank whose peer's connections were closed may take to know, well before any deadline.
const PROMPT_MS: f64 = 2500.0;

/// How a process ended, by itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exit {
    pub(crate) status: ExitStatus,
    pub(crate) at_ms: f64,
}

pub(crate) struct Evidence {
    /// By rank.
    pub(crate) records: Vec<Vec<Record>>,
    /// By rank; none for a process that had to be killed.
    pub(crate) exits: Vec<Option<Exit>>,
}

pub(crate) struct Verdict {
    pub(crate) failures: Vec<String>,
    pub(crate) detection_ms: Option<f64>,
    /// From the return of a training function to the end of its process, the slowest.
    pub(crate) exit_ms: f64,
    pub(crate) outcome: String,
}

pub(crate) fn port_was_taken(evidence: &Evidence) -> bool {
    evidence.records.iter().flatten().any(|record| match record {
        Record::Ended { outcome, .. } => outcome.text.contains("EADDRINUSE") || outcome.text.contains("already in use"),
        _ => false,
    })
}

/// A call that has returned.
struct Ended<'a> {
    call: u64,
    operation: Operation,
    step: Option<u64>,
    ms: f64,
    at_ms: f64,
    outcome: &'a Outcome,
}

impl Ended<'_> {
    fn completed(&self) -> bool {
        self.outcome.kind == OutcomeKind::Completed
    }
}

/// What one rank did.
#[derive(Default)]
struct Rank<'a> {
    begun: Vec<Planned>,
    ended: Vec<Ended<'a>>,
    held: Vec<(Moment, &'a str)>,
    fault_ms: Option<f64>,
    /// The tensor that a bit was flipped in.
    flipped: Option<&'a str>,
    dropped_ms: Option<f64>,
    done_ms: Option<f64>,
}

impl<'a> Rank<'a> {
    fn of(records: &'a [Record]) -> Self {
        let mut rank = Self::default();
        for record in records {
            match record {
                Record::Begun { call, operation, step } => {
                    rank.begun.push(Planned { call: *call, operation: *operation, step: *step });
                }
                Record::Ended { call, operation, step, ms, at_ms, outcome } => rank.ended.push(Ended {
                    call: *call,
                    operation: *operation,
                    step: *step,
                    ms: *ms,
                    at_ms: *at_ms,
                    outcome,
                }),
                Record::Held { moment, digest } => rank.held.push((*moment, digest)),
                Record::Fault { at_ms, tensor } => {
                    rank.fault_ms = Some(*at_ms);
                    rank.flipped = tensor.as_deref();
                }
                Record::Dropped { ms } => rank.dropped_ms = Some(*ms),
                Record::Done { at_ms } => rank.done_ms = Some(*at_ms),
            }
        }
        rank
    }

    fn first_failure(&self) -> Option<&Ended<'a>> {
        self.ended.iter().find(|ended| !ended.completed())
    }

    fn last_completed(&self) -> u64 {
        self.ended.iter().filter(|ended| ended.completed()).map(|ended| ended.call).max().unwrap_or(0)
    }

    fn call(&self, number: u64) -> Option<&Ended<'a>> {
        self.ended.iter().find(|ended| ended.call == number)
    }

    fn held(&self, wanted: Moment) -> Option<&'a str> {
        self.held.iter().find(|(moment, _)| *moment == wanted).map(|(_, digest)| *digest)
    }

    /// Whether the gradients of a step were synchronized.
    fn synchronized(&self, step: u64) -> bool {
        self.ended.iter().any(|ended| synchronizes(ended.operation) && ended.step == Some(step) && ended.completed())
    }
}

fn synchronizes(operation: Operation) -> bool {
    matches!(operation, Operation::SynchronizeGradients | Operation::SynchronizeGradientsPerToken)
}

struct Judge<'a> {
    scenario: &'a Scenario,
    ranks: Vec<Rank<'a>>,
    exits: &'a [Option<Exit>],
    failures: Vec<String>,
}

pub(crate) fn judge(scenario: &Scenario, evidence: &Evidence, references: &References) -> Verdict {
    let ranks = evidence.records.iter().map(|records| Rank::of(records)).collect();
    let mut judge = Judge { scenario, ranks, exits: &evidence.exits, failures: Vec::new() };
    judge.the_fault_happened();
    judge.no_call_beyond_its_deadline();
    judge.processes_end_by_themselves();
    judge.only_expected_errors();
    judge.no_wrong_step(references);
    judge.no_undetected_divergence();
    let kind = scenario.kind;
    if kind.interrupts() {
        judge.interrupted_together();
    } else if kind == Kind::Turns {
        if judge.live().any(|(_, rank)| rank.first_failure().is_some()) {
            judge.interrupted_together();
        }
    } else if kind.must_survive() {
        judge.nothing_came_of_it();
    } else if kind.disagrees() {
        judge.one_verdict();
    } else if kind.diverges() {
        judge.the_flip_is_named();
    }
    Verdict {
        detection_ms: judge.detection_ms(),
        exit_ms: judge.exit_ms(),
        outcome: judge.outcome(),
        failures: judge.failures,
    }
}

impl<'a> Judge<'a> {
    fn require(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.failures.push(what());
        }
    }

    /// Ranks that go on after the fault.
    fn live(&self) -> impl Iterator<Item = (usize, &Rank<'a>)> {
        self.ranks.iter().enumerate().filter(|(rank, _)| self.scenario.lives(*rank))
    }

    fn last_call(&self) -> u64 {
        self.scenario.plan().len() as u64
    }

    fn detection_ms(&self) -> Option<f64> {
        let fault = self.ranks[self.scenario.victim].fault_ms?;
        let turns = self.scenario.kind == Kind::Turns;
        let awake = self.live().filter(|(number, _)| !turns || *number != self.scenario.victim);
        let known = awake.filter_map(|(_, rank)| {
            // Who is stopped by turns does no harm before a call meets its deadline.
            rank.first_failure().map(|ended| if turns { ended.ms } else { ended.at_ms - fault })
        });
        known.reduce(f64::max)
    }

    fn exit_ms(&self) -> f64 {
        let lags = self.ranks.iter().zip(self.exits).enumerate().filter_map(|(number, (rank, exit))| {
            // A process that is stopped by turns also ends by turns.
            let own_pace = number != self.scenario.victim || self.scenario.kind != Kind::Turns;
            Some(exit.as_ref()?.at_ms - rank.done_ms?).filter(|_| own_pace)
        });
        lags.fold(0.0, f64::max)
    }

    fn outcome(&self) -> String {
        let mut outcomes: Vec<String> = self
            .live()
            .map(|(_, rank)| match rank.first_failure() {
                Some(ended) => format!("{:?} in call {}", ended.outcome.kind, ended.call),
                None => "all completed".to_string(),
            })
            .collect();
        outcomes.sort();
        outcomes.dedup();
        outcomes.join(", ")
    }

    fn the_fault_happened(&mut self) {
        let happened = self.ranks[self.scenario.victim].fault_ms.is_some();
        self.require(happened, || "the fault happened".into());
    }

    fn no_call_beyond_its_deadline(&mut self) {
        let scenario = self.scenario;
        let mut failures = Vec::new();
        for (number, rank) in self.live() {
            if scenario.kind == Kind::Turns && number == scenario.victim {
                continue; // It was stopped itself.
            }
            for ended in &rank.ended {
                #[allow(clippy::cast_precision_loss)] // Seconds.
                let limit = scenario.limit_ms(ended.operation) as f64 + BEYOND_MS;
                if ended.ms > limit {
                    failures.push(format!(
                        "no call beyond its deadline and 2 s: rank {number} spent {:.0} ms in call {}, {}: {}",
                        ended.ms, ended.call, ended.operation, ended.outcome.text
                    ));
                }
            }
            if let Some(ms) = rank.dropped_ms
                && ms > BEYOND_MS
            {
                failures.push(format!("a session is dropped within 2 s: rank {number} needed {ms:.0} ms"));
            }
        }
        self.failures.extend(failures);
    }

    fn processes_end_by_themselves(&mut self) {
        let scenario = self.scenario;
        let mut failures = Vec::new();
        for (number, (rank, exit)) in self.ranks.iter().zip(self.exits).enumerate() {
            if number == scenario.victim && scenario.kind.stops() {
                continue;
            }
            let under_way = || match rank.begun.last() {
                Some(call) if rank.call(call.call).is_none() => format!("in call {}, {}", call.call, call.operation),
                _ => "between calls".to_string(),
            };
            let Some(exit) = exit else {
                failures.push(format!("processes end by themselves: rank {number} was still there, {}", under_way()));
                continue;
            };
            if number == scenario.victim && scenario.kind.kills() {
                if exit.status.signal() != Some(Signal::SIGKILL as i32) {
                    failures.push(format!("the victim was killed: {}", exit.status));
                }
                continue;
            }
            if !exit.status.success() {
                failures.push(format!(
                    "processes end in order: rank {number} ended with {}, {}",
                    exit.status,
                    under_way()
                ));
            }
            let own_pace = number != scenario.victim || scenario.kind != Kind::Turns;
            match rank.done_ms {
                Some(done) if own_pace && exit.at_ms - done > EXIT_MS => {
                    failures.push(format!("processes end at once: rank {number} needed {:.0} ms", exit.at_ms - done));
                }
                None if exit.status.success() => {
                    failures.push(format!("the loop comes to its end: rank {number} left it, {}", under_way()));
                }
                _ => {}
            }
        }
        self.failures.extend(failures);
    }

    fn only_expected_errors(&mut self) {
        let scenario = self.scenario;
        let mut failures = Vec::new();
        for (number, rank) in self.ranks.iter().enumerate() {
            for ended in &rank.ended {
                let expected = match ended.outcome.kind {
                    OutcomeKind::Unexpected => false,
                    OutcomeKind::Panicked => {
                        number == scenario.victim && scenario.kind == Kind::Panicked && ended.call == scenario.at.call
                    }
                    _ => true,
                };
                if !expected {
                    failures.push(format!(
                        "only errors of the right kind: rank {number} got in call {}, {}: {}",
                        ended.call, ended.operation, ended.outcome.text
                    ));
                }
                // What comes before the fault is not touched by it.
                if ended.call + 1 < scenario.at.call && !ended.completed() {
                    failures.push(format!(
                        "no error before the fault: rank {number} got in call {}, {}: {}",
                        ended.call, ended.operation, ended.outcome.text
                    ));
                }
            }
        }
        self.failures.extend(failures);
    }

    /// Every step is the one that an undisturbed run takes, or leaves everything as it is.
    fn no_wrong_step(&mut self, references: &References) {
        let scenario = self.scenario;
        // In a step that all have refused together nobody learns anything; later steps go on from there.
        let without: BTreeSet<u64> = if scenario.kind.disagrees() {
            let witness = &self.ranks[(scenario.victim + 1) % scenario.world];
            let refused = |ended: &&Ended<'_>| synchronizes(ended.operation) && !ended.completed();
            witness.ended.iter().filter(refused).filter_map(|ended| ended.step).collect()
        } else {
            BTreeSet::new()
        };
        let reference = references.get(scenario, &without);
        if let Some(problem) = &reference.problem {
            self.failures.push(format!("an undisturbed run is right: {problem}"));
            return;
        }
        let mut failures = Vec::new();
        for (number, rank) in self.ranks.iter().enumerate() {
            let broadcast =
                rank.ended.iter().any(|ended| ended.operation == Operation::BroadcastParameters && ended.completed());
            let mut before = rank.held(Moment::Start);
            if broadcast && before.is_some_and(|digest| digest != reference.start) {
                failures.push(format!("no wrong start: rank {number} begins with other parameters than rank 0's"));
            }
            for step in 0..scenario.steps {
                let Some(digest) = rank.held(Moment::Step(step)) else { break };
                // A flipped bit changes what is learned from it.
                let disturbed = scenario.kind.diverges() && Some(step) >= scenario.at.step;
                if rank.synchronized(step) {
                    let right = reference.steps.get(usize::try_from(step).expect("a step"));
                    if !disturbed && right.is_none_or(|right| right != digest) {
                        failures.push(format!("no wrong step: rank {number} is elsewhere after step {step}"));
                    }
                } else if before != Some(digest) {
                    failures.push(format!(
                        "no wrong step: rank {number} stepped in step {step} without synchronized gradients"
                    ));
                }
                before = Some(digest);
            }
        }
        self.failures.extend(failures);
    }

    /// A comparison of replicas succeeds exactly when they are equal.
    fn no_undetected_divergence(&mut self) {
        let mut failures = Vec::new();
        for planned in self.scenario.plan().iter().filter(|call| call.operation == Operation::AssertRankEqual) {
            let call = planned.call;
            let held: Vec<&str> = self.ranks.iter().filter_map(|rank| rank.held(Moment::Check(call))).collect();
            if held.len() < self.scenario.world {
                continue; // Then it was interrupted, which is looked at elsewhere.
            }
            let equal = held.iter().all(|digest| *digest == held[0]);
            for (number, rank) in self.ranks.iter().enumerate() {
                match rank.call(call).map(|ended| ended.outcome.kind) {
                    Some(OutcomeKind::Completed) if !equal => {
                        failures.push(format!("no undetected divergence: rank {number} saw none in call {call}"));
                    }
                    Some(OutcomeKind::RanksDiffer) if equal => {
                        failures.push(format!("no imagined divergence: rank {number} saw one in call {call}"));
                    }
                    _ => {}
                }
            }
        }
        self.failures.extend(failures);
    }

    fn interrupted_together(&mut self) {
        let scenario = self.scenario;
        let at = scenario.at.call;
        let mut failures = Vec::new();
        let firsts: BTreeMap<usize, &Ended<'_>> =
            self.live().filter_map(|(number, rank)| Some((number, rank.first_failure()?))).collect();
        let Some(first) = firsts.values().map(|ended| ended.call).min() else {
            // Nobody needed the lost rank any more.
            let none_followed = at == self.last_call() && scenario.kind != Kind::EarlyReturn;
            self.require(none_followed, || "survivors are interrupted: none was".into());
            return;
        };
        for (number, rank) in self.live() {
            let Some(failed) = firsts.get(&number) else {
                // One that completed everything, in the last call of all.
                if first != self.last_call() {
                    failures.push(format!("survivors are interrupted: rank {number} was not"));
                }
                continue;
            };
            let panicked = number == scenario.victim && scenario.kind == Kind::Panicked;
            if failed.outcome.kind != OutcomeKind::Interrupted && !panicked {
                failures.push(format!(
                    "a loss is an interruption: rank {number} got {:?}: {}",
                    failed.outcome.kind, failed.outcome.text
                ));
            }
            if failed.call > first + 1 {
                failures.push(format!(
                    "interrupted at most one call apart: rank {number} in call {}, another in call {first}",
                    failed.call
                ));
            }
            // Two ranks that do not reach each other may still hear of each other's next call from a third.
            let latest = if scenario.kind == Kind::PairCut { first + 1 } else { at + 1 };
            let in_place = failed.call + 1 >= at && failed.call <= latest && first <= at + 1;
            if scenario.kind != Kind::Turns && !in_place {
                failures.push(format!("interrupted where it happened: rank {number} in call {}", failed.call));
            }
            if rank.last_completed() > first {
                failures.push(format!(
                    "nobody completes the call after a failed one: rank {number} completed call {}, call {first} failed elsewhere",
                    rank.last_completed()
                ));
            }
            for later in rank.ended.iter().filter(|ended| ended.call > failed.call) {
                if later.outcome.kind != OutcomeKind::Poisoned {
                    failures.push(format!(
                        "everything is refused afterwards: rank {number} got {:?} in call {}",
                        later.outcome.kind, later.call
                    ));
                }
            }
            // A store in a file cannot be lost.
            let store_lost = failed.outcome.store_lost && scenario.meeting == Meeting::Tcp;
            let named = store_lost || failed.outcome.missing.contains(&scenario.victim);
            if scenario.kind.removes_the_victim() && !named {
                failures.push(format!("the lost rank is named: rank {number} got {}", failed.outcome.text));
            }
            let fault = self.ranks[scenario.victim].fault_ms;
            if let Some(fault) = fault
                && scenario.kind.closes_connections()
                && failed.at_ms - fault > PROMPT_MS
            {
                failures.push(format!(
                    "a closed connection is noticed before the deadline: rank {number} needed {:.0} ms: {}",
                    failed.at_ms - fault,
                    failed.outcome.text
                ));
            }
        }
        self.failures.extend(failures);
    }

    fn nothing_came_of_it(&mut self) {
        let planned = self.last_call();
        let mut failures = Vec::new();
        for (number, rank) in self.ranks.iter().enumerate() {
            if let Some(ended) = rank.first_failure() {
                failures.push(format!(
                    "it is survived: rank {number} got in call {}, {}: {}",
                    ended.call, ended.operation, ended.outcome.text
                ));
            } else if rank.last_completed() != planned {
                failures
                    .push(format!("it is survived: rank {number} made {} of {planned} calls", rank.last_completed()));
            }
        }
        self.failures.extend(failures);
    }

    /// All ranks refuse in the same call with the same words, and are together afterwards.
    fn one_verdict(&mut self) {
        let scenario = self.scenario;
        let at = scenario.at.call;
        let left_at = if scenario.kind == Kind::EarlyShutdown { Some(at) } else { None };
        let mut failures = Vec::new();
        for call in 1..=self.last_call() {
            let ends: Vec<(usize, &Ended<'_>)> =
                self.live().filter_map(|(number, rank)| Some((number, rank.call(call)?))).collect();
            let Some((_, first)) = ends.first() else { continue };
            if left_at.is_some_and(|left| call > left) {
                // The rank that has left is missed, in every call that comes.
                for (number, ended) in &ends {
                    if !matches!(ended.outcome.kind, OutcomeKind::Interrupted | OutcomeKind::Poisoned) {
                        failures.push(format!(
                            "a rank that has left is missed: rank {number} in call {call}: {:?}",
                            ended.outcome.kind
                        ));
                    }
                }
                continue;
            }
            if ends.len() != scenario.world {
                failures.push(format!("all ranks return from call {call}: {} did", ends.len()));
            }
            for (number, ended) in &ends {
                let (mine, its) = (ended.outcome, first.outcome);
                if mine.kind != its.kind || mine.text != its.text {
                    failures.push(format!(
                        "one verdict on all ranks: call {call}: rank {number} got {:?} {:?}, rank {} {:?} {:?}",
                        mine.kind, mine.text, ends[0].0, its.kind, its.text
                    ));
                }
            }
            let expected = if call < at || (call > at && scenario.kind != Kind::SkippedBatch) {
                OutcomeKind::Completed
            } else {
                match scenario.kind {
                    Kind::SparseGradient => OutcomeKind::Refused,
                    Kind::SwappedNames => OutcomeKind::SchemaDiffers,
                    Kind::SkippedBatch if first.step.is_none() => OutcomeKind::Completed,
                    _ => OutcomeKind::Desynchronized,
                }
            };
            if first.outcome.kind != expected {
                failures.push(format!(
                    "the right verdict in call {call}: {expected:?}, not {:?}: {}",
                    first.outcome.kind, first.outcome.text
                ));
            }
            if call == at
                && scenario.kind == Kind::SparseGradient
                && first.outcome.refused != Some((scenario.victim, model::EMBEDDING.to_string()))
            {
                failures.push(format!("rank and tensor are named: {:?}", first.outcome.refused));
            }
        }
        self.failures.extend(failures);
    }

    /// The first comparison after the flip names the tensor, and the rank where that can be told.
    fn the_flip_is_named(&mut self) {
        let scenario = self.scenario;
        let victim = scenario.victim;
        let mut failures = Vec::new();
        let checks: Vec<u64> = scenario
            .plan()
            .iter()
            .filter(|call| call.operation == Operation::AssertRankEqual && call.call >= scenario.at.call)
            .map(|call| call.call)
            .collect();
        let first = checks[0];
        for call in checks {
            let reports: Vec<(usize, &Outcome)> = self
                .ranks
                .iter()
                .enumerate()
                .filter_map(|(number, rank)| Some((number, rank.call(call)?.outcome)))
                .collect();
            // A caller that stops does not come to the later ones.
            if call == first && reports.len() != scenario.world {
                failures.push(format!("all ranks compare after the flip: {} did", reports.len()));
            }
            for (number, outcome) in &reports {
                if outcome.kind != OutcomeKind::RanksDiffer {
                    failures.push(format!("the flip is found: rank {number} got {:?} in call {call}", outcome.kind));
                    continue;
                }
                if outcome.text != reports[0].1.text {
                    failures.push(format!("one verdict on all ranks: call {call}: rank {number} got {}", outcome.text));
                }
                let fits = |(name, sides, majority): &(String, Vec<Vec<usize>>, Option<usize>)| {
                    let tensor = self.ranks[victim].flipped == Some(name.as_str());
                    let alone = sides.len() == 2 && sides.contains(&vec![victim]);
                    let blamed = match majority {
                        None => scenario.world == 2,
                        Some(side) => scenario.world > 2 && !sides[*side].contains(&victim),
                    };
                    tensor && alone && blamed
                };
                if outcome.differing.len() != 1 || !outcome.differing.iter().all(fits) {
                    failures.push(format!("tensor and rank are named: {:?}", outcome.differing));
                }
            }
        }
        self.failures.extend(failures);
    }
}
