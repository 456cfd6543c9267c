//! A scenario: everything about a run that follows from its seed.

use std::fmt;

use rand::prelude::*;
use rand::rngs::StdRng;
use serde::{Deserialize, Serialize};
use sft_sync::Operation;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// SIGKILL.
    Killed,
    /// SIGSTOP, for good.
    Stopped,
    /// SIGSTOP and SIGCONT by turns, for longer than the deadline.
    Turns,
    /// The rank's training function returns, and its process ends in order.
    EarlyReturn,
    /// The engine fails on one rank, which lives on.
    EngineFailure,
    /// A call panics; the panic is caught outside it.
    Panicked,
    /// Three seconds of nothing, which the deadline allows.
    Stalled,
    /// A bit of a parameter flips.
    FlippedParameter,
    /// A bit of a frozen tensor flips.
    FlippedFrozen,
    /// A bit of a gradient flips between synchronization and the optimizer's step.
    FlippedGradient,
    /// A gradient is sparse in one step.
    SparseGradient,
    /// The list of parameters comes in another order, which is allowed.
    Reordered,
    /// Two tensors stand under each other's names in one step.
    SwappedNames,
    /// The rank has skipped a batch, and its step numbers are ahead of the others' from there on.
    SkippedBatch,
    /// The rank makes another call than the others, once.
    OtherCall,
    /// The rank shuts down while the others go on.
    EarlyShutdown,
    /// SIGKILL for the process that hosts the store.
    HostKilled,
    /// SIGSTOP for the process that hosts the store.
    HostStopped,
    /// The rank's network link goes down, for good.
    LinkCut,
    /// Packets between the rank and one other are dropped, one way or both; they still reach everybody else.
    PairCut,
    /// The rank's network link is slow, or down for a while.
    LinkDelayed,
}

impl Kind {
    pub(crate) const ALL: [Self; 21] = [
        Self::Killed,
        Self::Stopped,
        Self::Turns,
        Self::EarlyReturn,
        Self::EngineFailure,
        Self::Panicked,
        Self::Stalled,
        Self::FlippedParameter,
        Self::FlippedFrozen,
        Self::FlippedGradient,
        Self::SparseGradient,
        Self::Reordered,
        Self::SwappedNames,
        Self::SkippedBatch,
        Self::OtherCall,
        Self::EarlyShutdown,
        Self::HostKilled,
        Self::HostStopped,
        Self::LinkCut,
        Self::PairCut,
        Self::LinkDelayed,
    ];

    pub(crate) fn needs_network(self) -> bool {
        matches!(self, Self::LinkCut | Self::PairCut | Self::LinkDelayed)
    }

    /// The fault happens inside a call, at a point that the library names.
    pub(crate) fn at_a_point(self) -> bool {
        matches!(
            self,
            Self::Killed
                | Self::Stopped
                | Self::Turns
                | Self::EngineFailure
                | Self::Panicked
                | Self::Stalled
                | Self::HostKilled
                | Self::HostStopped
        ) || self.needs_network()
    }

    /// The victim's process takes no further part.
    pub(crate) fn removes_the_victim(self) -> bool {
        self.kills() || self.stops() || matches!(self, Self::EarlyReturn)
    }

    pub(crate) fn kills(self) -> bool {
        matches!(self, Self::Killed | Self::HostKilled)
    }

    pub(crate) fn stops(self) -> bool {
        matches!(self, Self::Stopped | Self::HostStopped)
    }

    /// A process or a link is lost.
    pub(crate) fn interrupts(self) -> bool {
        self.removes_the_victim()
            || matches!(self, Self::EngineFailure | Self::Panicked | Self::LinkCut | Self::PairCut)
    }

    /// The victim's connections close, so that nobody has to wait for a deadline to know.
    pub(crate) fn closes_connections(self) -> bool {
        self.kills() || matches!(self, Self::EarlyReturn | Self::EngineFailure)
    }

    /// All ranks are there and must refuse together.
    pub(crate) fn disagrees(self) -> bool {
        matches!(
            self,
            Self::SparseGradient | Self::SwappedNames | Self::SkippedBatch | Self::OtherCall | Self::EarlyShutdown
        )
    }

    pub(crate) fn diverges(self) -> bool {
        matches!(self, Self::FlippedParameter | Self::FlippedFrozen | Self::FlippedGradient)
    }

    /// Nothing may come of it.
    pub(crate) fn must_survive(self) -> bool {
        matches!(self, Self::Stalled | Self::Reordered | Self::LinkDelayed)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Killed => "killed",
            Self::Stopped => "stopped",
            Self::Turns => "stopped by turns",
            Self::EarlyReturn => "early return",
            Self::EngineFailure => "engine failure",
            Self::Panicked => "panic",
            Self::Stalled => "stall",
            Self::FlippedParameter => "bit of a parameter",
            Self::FlippedFrozen => "bit of a buffer",
            Self::FlippedGradient => "bit of a gradient",
            Self::SparseGradient => "sparse gradient",
            Self::Reordered => "reordered list",
            Self::SwappedNames => "swapped names",
            Self::SkippedBatch => "skipped batch",
            Self::OtherCall => "another call",
            Self::EarlyShutdown => "early shutdown",
            Self::HostKilled => "host killed",
            Self::HostStopped => "host stopped",
            Self::LinkCut => "link cut",
            Self::PairCut => "pair cut",
            Self::LinkDelayed => "link delayed",
        })
    }
}

/// What a rank does about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Caller {
    /// Returns at the first one.
    Stops,
    /// Goes on with everything, optimizer steps included.
    Ignores,
}

/// Where ranks meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Meeting {
    Tcp,
    File,
}

/// A call that every rank makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Planned {
    /// Its number in the session, counted from 1.
    pub(crate) call: u64,
    pub(crate) operation: Operation,
    pub(crate) step: Option<u64>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Scenario {
    pub(crate) seed: u64,
    pub(crate) world: usize,
    pub(crate) steps: u64,
    pub(crate) caller: Caller,
    pub(crate) meeting: Meeting,
    pub(crate) shape: Shape,
    pub(crate) connect_ms: u64,
    pub(crate) operation_ms: u64,
    pub(crate) kind: Kind,
    pub(crate) victim: usize,
    /// Another rank, for faults between two.
    pub(crate) peer: usize,
    /// The call in which, or before which, the fault happens.
    pub(crate) at: Planned,
    /// Where in the call, for a fault at a point: its name, and how many times it is passed first. A call that should not
    /// come there so often has the fault at its end.
    pub(crate) point: String,
    pub(crate) passes: u32,
    /// A number for whatever else has to be chosen: the bit, the element, the length of a pause.
    pub(crate) dice: u64,
}

/// What decides the bits of an undisturbed run, apart from the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools)] // Each is a choice of its own.
pub(crate) struct Shape {
    pub(crate) per_token: bool,
    pub(crate) flat: bool,
    pub(crate) fence_each_bucket: bool,
    pub(crate) small_buckets: bool,
    /// With a parameter of some megabytes, so that a fault can fall into the middle of a transfer.
    pub(crate) wide: bool,
}

/// How long a stall lasts.
pub(crate) const STALL_MS: u64 = 3000;

impl Scenario {
    /// `network`: whether links between network namespaces can be cut here; where they cannot, another fault is chosen.
    pub(crate) fn new(seed: u64, network: bool) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let mut kind = *Kind::ALL.choose(&mut random).expect("there are kinds");
        while kind.needs_network() && !network {
            kind = *Kind::ALL.choose(&mut random).expect("there are kinds");
        }
        let world = random.random_range(2..=5);
        let steps = random.random_range(4..=8);
        let caller = if random.random() { Caller::Stops } else { Caller::Ignores };
        let host = matches!(kind, Kind::HostKilled | Kind::HostStopped);
        let meeting = if host || random.random() { Meeting::Tcp } else { Meeting::File };
        let victim = if host { 0 } else { random.random_range(0..world) };
        let shape = Shape {
            per_token: random.random(),
            flat: random.random(),
            fence_each_bucket: random.random(),
            small_buckets: random.random(),
            wide: kind == Kind::Turns || random.random_ratio(1, 4),
        };
        let plan = plan(steps, shape);
        let at = choose_call(kind, &plan, &mut random);
        let point = points(at.operation).choose(&mut random).expect("each operation has points");
        Self {
            seed,
            world,
            steps,
            caller,
            meeting,
            shape,
            connect_ms: if at.operation == Operation::Connect { 8_000 } else { 30_000 },
            operation_ms: match kind {
                Kind::Stalled | Kind::LinkDelayed => 8_000,
                Kind::Turns => 2_000,
                _ if kind.stops() || kind.needs_network() => 3_000,
                _ => 5_000,
            },
            kind,
            victim,
            peer: (victim + random.random_range(1..world)) % world,
            at,
            point: (*point).to_string(),
            passes: random.random_range(0..times(point, at.operation, world, shape)),
            dice: random.random(),
        }
    }

    pub(crate) fn plan(&self) -> Vec<Planned> {
        plan(self.steps, self.shape)
    }

    /// The deadline of a call.
    pub(crate) fn limit_ms(&self, operation: Operation) -> u64 {
        if operation == Operation::Connect { self.connect_ms } else { self.operation_ms }
    }

    /// Whether the rank is one that goes on after the fault and should be heard.
    pub(crate) fn lives(&self, rank: usize) -> bool {
        rank != self.victim || !self.kind.removes_the_victim()
    }

    /// Where the fault happens, in words.
    pub(crate) fn place(&self) -> String {
        let step = self.at.step.map(|step| format!(" step {step}")).unwrap_or_default();
        let point = if self.kind.at_a_point() { format!(" {}+{}", self.point, self.passes) } else { String::new() };
        format!("call {} {}{step}{point}", self.at.call, self.at.operation)
    }
}

/// The calls of a whole run, in order.
fn plan(steps: u64, shape: Shape) -> Vec<Planned> {
    let mut calls =
        vec![(Operation::Connect, None), (Operation::BroadcastParameters, None), (Operation::AssertRankEqual, None)];
    for step in 0..steps {
        calls.push((Operation::Sum, Some(step)));
        if asks(step) {
            calls.push((Operation::AllAgree, Some(step)));
        }
        let synchronize =
            if shape.per_token { Operation::SynchronizeGradientsPerToken } else { Operation::SynchronizeGradients };
        calls.push((synchronize, Some(step)));
        if checks(step, steps) {
            calls.push((Operation::AssertRankEqual, Some(step)));
        }
    }
    calls.push((Operation::Shutdown, None));
    (1..).zip(calls).map(|(call, (operation, step))| Planned { call, operation, step }).collect()
}

/// Whether ranks ask each other in this step.
pub(crate) fn asks(step: u64) -> bool {
    step % 3 == 1
}

/// Whether replicas are compared after this step.
pub(crate) fn checks(step: u64, steps: u64) -> bool {
    step % 2 == 1 || step + 1 == steps
}

fn choose_call(kind: Kind, plan: &[Planned], random: &mut StdRng) -> Planned {
    let last_check =
        plan.iter().rposition(|call| call.operation == Operation::AssertRankEqual).expect("a run ends with a check");
    let synchronizes = |call: &Planned| {
        matches!(call.operation, Operation::SynchronizeGradients | Operation::SynchronizeGradientsPerToken)
    };
    let fitting: Vec<Planned> = match kind {
        _ if kind.at_a_point() => {
            // Each operation as often as the others, however many calls of it there are.
            let mut operations: Vec<Operation> = Vec::new();
            for call in plan {
                if !operations.contains(&call.operation) {
                    operations.push(call.operation);
                }
            }
            let operation = *operations.choose(random).expect("there are operations");
            plan.iter().filter(|call| call.operation == operation).copied().collect()
        }
        Kind::EarlyReturn => plan[1..].to_vec(),
        // So that a check follows.
        Kind::FlippedParameter | Kind::FlippedFrozen => plan[3..=last_check].to_vec(),
        Kind::OtherCall | Kind::EarlyShutdown => plan[3..plan.len() - 1].to_vec(),
        Kind::SkippedBatch => plan.iter().filter(|call| call.operation == Operation::Sum).copied().collect(),
        _ => plan.iter().filter(|call| synchronizes(call)).copied().collect(),
    };
    *fitting.choose(random).expect("every kind fits some call")
}

/// How often a call comes to a point, at least.
fn times(point: &str, operation: Operation, world: usize, shape: Shape) -> u32 {
    let buckets = if shape.small_buckets { 3 } else { 1 };
    let fences = if shape.fence_each_bucket { buckets } else { 0 };
    let exchanges = match operation {
        Operation::BroadcastParameters | Operation::SynchronizeGradients => 1 + fences,
        Operation::SynchronizeGradientsPerToken => 2 + fences,
        Operation::Sum => 2,
        _ => 1,
    };
    match point {
        "ExchangePosted" | "ExchangeDone" => exchanges,
        "ExchangeSent" => exchanges * world.next_power_of_two().trailing_zeros(),
        "DataPosted" | "DataDone" => buckets,
        _ => 1,
    }
}

/// The points that an operation passes.
fn points(operation: Operation) -> &'static [&'static str] {
    match operation {
        Operation::BroadcastParameters | Operation::SynchronizeGradients | Operation::SynchronizeGradientsPerToken => {
            &["CallEntered", "ExchangePosted", "ExchangeSent", "ExchangeDone", "DataPosted", "DataDone", "CallLeaving"]
        }
        _ => &["CallEntered", "ExchangePosted", "ExchangeSent", "ExchangeDone", "CallLeaving"],
    }
}
