//! A rank in a process of its own: the training loop, and a hook at which the fault happens.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{fs, thread};

use nix::sys::signal::{self, Signal};
use nix::unistd;
use serde::{Deserialize, Serialize};
use sft_sync::fault::Point;
use sft_sync::{Rendezvous, SyncSession};

use crate::record::{Log, Record, now_ms};
use crate::scenario::{Kind, Meeting, STALL_MS, Scenario};
use crate::train::{Trainer, shaped};

/// What the controller tells a rank.
#[derive(Serialize, Deserialize)]
pub(crate) struct Task {
    pub(crate) scenario: Scenario,
    /// Where rank 0 hosts the store.
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) interface: Option<String>,
}

/// The files of a scenario.
pub(crate) struct Folder<'a>(pub(crate) &'a Path);

impl Folder<'_> {
    pub(crate) fn task(&self) -> PathBuf {
        self.0.join("task.json")
    }
    pub(crate) fn log(&self, rank: usize) -> PathBuf {
        self.0.join(format!("rank-{rank}.jsonl"))
    }
    pub(crate) fn stderr(&self, rank: usize) -> PathBuf {
        self.0.join(format!("rank-{rank}.stderr"))
    }
    /// Appears when the controller has done its part of the fault.
    pub(crate) fn go(&self) -> PathBuf {
        self.0.join("go")
    }
    fn store(&self) -> PathBuf {
        self.0.join("store")
    }
}

pub(crate) fn run(folder: &Path, rank: usize) {
    // A controller that dies takes its ranks along, stopped ones too.
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).expect("the signal can be set");
    tch::set_num_threads(1);
    let files = Folder(folder);
    let task: Task = serde_json::from_slice(&fs::read(files.task()).expect("a task")).expect("a task");
    let scenario = &task.scenario;
    let log = Log::to_file(&files.log(rank)).expect("a log");
    let mut trainer = Trainer::new(scenario, rank, log.clone());

    let mut builder = SyncSession::builder()
        .rank(rank)
        .world_size(scenario.world)
        .connect_timeout(Duration::from_millis(scenario.connect_ms))
        .operation_timeout(Duration::from_millis(scenario.operation_ms))
        .rendezvous(match scenario.meeting {
            Meeting::Tcp => Rendezvous::Tcp { host: task.host.clone(), port: task.port, hosted_elsewhere: false },
            Meeting::File => Rendezvous::File(files.store()),
        });
    if let Some(interface) = &task.interface {
        builder = builder.interface(interface);
    }
    if rank == scenario.victim && scenario.kind.at_a_point() {
        let trigger = Trigger {
            scenario: scenario.clone(),
            log,
            calls: trainer.calls(),
            passes: AtomicU32::new(0),
            fired: AtomicBool::new(false),
            go: files.go(),
        };
        builder = builder.fault_hook(Arc::new(move |point| trigger.reach(point)));
    }
    trainer.run(shaped(builder, scenario.shape));
}

struct Trigger {
    scenario: Scenario,
    log: Log,
    /// The number of the call under way.
    calls: Arc<AtomicU64>,
    passes: AtomicU32,
    fired: AtomicBool,
    go: PathBuf,
}

impl Trigger {
    fn reach(&self, point: Point) -> bool {
        let scenario = &self.scenario;
        if self.calls.load(Ordering::SeqCst) != scenario.at.call || self.fired.load(Ordering::SeqCst) {
            return true;
        }
        let here =
            format!("{point:?}") == scenario.point && self.passes.fetch_add(1, Ordering::SeqCst) >= scenario.passes;
        // At the latest when the call is about to return.
        if !here && point != Point::CallLeaving {
            return true;
        }
        self.fired.store(true, Ordering::SeqCst);
        self.log.write(&Record::Fault { at_ms: now_ms(), tensor: None });
        match scenario.kind {
            Kind::Killed | Kind::HostKilled => {
                signal::kill(unistd::getpid(), Signal::SIGKILL).expect("a signal to oneself");
                thread::sleep(Duration::from_secs(60));
            }
            Kind::Stopped | Kind::HostStopped | Kind::Turns => {
                signal::raise(Signal::SIGSTOP).expect("a signal to oneself");
            }
            Kind::EngineFailure => return false,
            Kind::Panicked => panic!("the scenario's panic"),
            Kind::Stalled => thread::sleep(Duration::from_millis(STALL_MS)),
            Kind::LinkCut | Kind::PairCut | Kind::LinkDelayed => self.await_controller(),
            _ => {}
        }
        true
    }

    fn await_controller(&self) {
        let start = Instant::now();
        while !self.go.exists() && start.elapsed() < Duration::from_secs(2) {
            thread::sleep(Duration::from_millis(1));
        }
    }
}
