//! Runs a scenario: starts the ranks, does what of the fault has to come from outside, waits, and has it judged.

use std::fs::File;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, io, thread};

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;

use crate::checks::{self, Evidence, Exit};
use crate::netns::{self, Network};
use crate::record::{self, Record, now_ms};
use crate::reference::References;
use crate::scenario::{Kind, Scenario};
use crate::worker::{Folder, Task};

/// No rank may need longer than this: whoever still runs is hanging.
const PATIENCE: Duration = Duration::from_secs(60);

/// How a scenario went.
pub(crate) struct Report {
    pub(crate) scenario: Scenario,
    /// From the fault until the last rank knew of it.
    pub(crate) detection_ms: Option<f64>,
    pub(crate) exit_ms: f64,
    /// How it ended, in words.
    pub(crate) outcome: String,
    pub(crate) failures: Vec<String>,
    /// Everything that was written down, for a scenario that failed.
    pub(crate) evidence: Vec<String>,
}

pub(crate) fn run(scenario: Scenario, references: &References) -> Report {
    let mut ran = ranks(&scenario);
    // Another process may have taken the port that was free a moment ago.
    for _ in 0..2 {
        if !ran.as_ref().is_ok_and(|(evidence, _)| checks::port_was_taken(evidence)) {
            break;
        }
        ran = ranks(&scenario);
    }
    match ran {
        Ok((evidence, stderr)) => {
            let verdict = checks::judge(&scenario, &evidence, references);
            let mut text = Vec::new();
            if !verdict.failures.is_empty() {
                for (rank, (records, stderr)) in evidence.records.iter().zip(&stderr).enumerate() {
                    text.push(format!("rank {rank}: {:?}", evidence.exits[rank]));
                    text.extend(records.iter().map(|record| format!("  {record:?}")));
                    text.extend(stderr.lines().map(|line| format!("  | {line}")));
                }
            }
            Report {
                scenario,
                detection_ms: verdict.detection_ms,
                exit_ms: verdict.exit_ms,
                outcome: verdict.outcome,
                failures: verdict.failures,
                evidence: text,
            }
        }
        Err(error) => Report {
            scenario,
            detection_ms: None,
            exit_ms: 0.0,
            outcome: "not run".into(),
            failures: vec![format!("the scenario could be run: {error}")],
            evidence: Vec::new(),
        },
    }
}

/// Processes that end with their owner, whatever happens.
struct Ranks {
    children: Vec<Child>,
    exits: Vec<Option<(ExitStatus, f64)>>,
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            // Fails for one that has been waited for, which is as it should be.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Ranks {
    fn start(scenario: &Scenario, folder: &Path, network: Option<&Network>) -> io::Result<Self> {
        let program = env::current_exe()?;
        let mut ranks = Self { children: Vec::new(), exits: Vec::new() };
        for rank in 0..scenario.world {
            let mut command = match network {
                Some(network) => network.command(rank, &program),
                None => Command::new(&program),
            };
            let child = command
                .arg("rank")
                .arg(folder)
                .arg(rank.to_string())
                .env("OMP_NUM_THREADS", "1")
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(File::create(Folder(folder).stderr(rank))?)
                .spawn()?;
            ranks.children.push(child);
            ranks.exits.push(None);
        }
        Ok(ranks)
    }

    fn look(&mut self) -> io::Result<()> {
        for (child, exit) in self.children.iter_mut().zip(&mut self.exits) {
            if exit.is_none() {
                *exit = child.try_wait()?.map(|status| (status, now_ms()));
            }
        }
        Ok(())
    }

    fn signal(&self, rank: usize, signal: Signal) {
        if self.exits[rank].is_none() {
            // Not waited for yet, so the process id is still its own.
            let pid = i32::try_from(self.children[rank].id()).expect("a process id");
            let _ = signal::kill(Pid::from_raw(pid), signal);
        }
    }
}

fn ranks(scenario: &Scenario) -> io::Result<(Evidence, Vec<String>)> {
    let folder = tempfile::tempdir()?;
    let files = Folder(folder.path());
    let network = if scenario.kind.needs_network() { Some(Network::new(scenario.world)?) } else { None };
    let task = Task {
        scenario: scenario.clone(),
        host: if network.is_some() { netns::address(0) } else { "127.0.0.1".into() },
        port: if network.is_some() { 29_500 } else { free_port()? },
        interface: network.is_some().then(|| netns::INTERFACE.to_string()),
    };
    fs::write(files.task(), serde_json::to_vec(&task)?)?;

    let mut ranks = Ranks::start(scenario, folder.path(), network.as_ref())?;
    let mut outside = Outside { scenario, files: &files, network: network.as_ref(), state: State::Waiting };
    let start = Instant::now();
    loop {
        ranks.look()?;
        // A stopped rank is there until the others have gone.
        let waits = |rank: usize| rank != scenario.victim || !scenario.kind.stops();
        let over = (0..scenario.world).filter(|rank| waits(*rank)).all(|rank| ranks.exits[rank].is_some());
        if over || start.elapsed() > PATIENCE {
            break;
        }
        outside.act(&ranks)?;
        thread::sleep(Duration::from_millis(2));
    }
    let exits = ranks.exits.iter().map(|exit| exit.map(|(status, at_ms)| Exit { status, at_ms })).collect();
    drop(ranks);
    let records = (0..scenario.world).map(|rank| record::read(&files.log(rank))).collect();
    let stderr = (0..scenario.world).map(|rank| fs::read_to_string(files.stderr(rank)).unwrap_or_default()).collect();
    Ok((Evidence { records, exits }, stderr))
}

fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// The part of a fault that a rank cannot do to itself.
struct Outside<'a> {
    scenario: &'a Scenario,
    files: &'a Folder<'a>,
    network: Option<&'a Network>,
    state: State,
}

enum State {
    /// For the rank to come to the point.
    Waiting,
    /// A stopped process runs for a moment again and again.
    Turning {
        since: Instant,
        stopped: bool,
        next: Instant,
    },
    /// A link that is to be mended.
    Down {
        until: Instant,
    },
    Done,
}

impl Outside<'_> {
    fn act(&mut self, ranks: &Ranks) -> io::Result<()> {
        let scenario = self.scenario;
        let now = Instant::now();
        match self.state {
            State::Waiting if scenario.kind == Kind::Turns && self.at_the_point() => {
                self.state = State::Turning { since: now, stopped: true, next: now + self.pause() };
            }
            State::Waiting if self.network.is_some() && self.at_the_point() => {
                self.state = self.disturb_link()?;
                File::create(self.files.go())?;
            }
            State::Turning { since, stopped, next } if now >= next => {
                // Longer than the deadline, whichever call it falls into.
                let enough = since.elapsed() > Duration::from_millis(scenario.operation_ms * 3);
                if stopped {
                    ranks.signal(scenario.victim, Signal::SIGCONT);
                    let run = Duration::from_millis(1 + scenario.dice % 3);
                    self.state =
                        if enough { State::Done } else { State::Turning { since, stopped: false, next: now + run } };
                } else {
                    ranks.signal(scenario.victim, Signal::SIGSTOP);
                    self.state = State::Turning { since, stopped: true, next: now + self.pause() };
                }
            }
            State::Down { until } if now >= until => {
                if let Some(network) = self.network {
                    network.mend(scenario.victim)?;
                }
                self.state = State::Done;
            }
            _ => {}
        }
        Ok(())
    }

    fn pause(&self) -> Duration {
        Duration::from_millis(200 + self.scenario.dice / 16 % 1300)
    }

    fn at_the_point(&self) -> bool {
        let records = record::read(&self.files.log(self.scenario.victim));
        records.iter().any(|record| matches!(record, Record::Fault { .. }))
    }

    fn disturb_link(&self) -> io::Result<State> {
        let Some(network) = self.network else { return Ok(State::Done) };
        let Scenario { kind, victim, peer, dice, .. } = *self.scenario;
        match kind {
            Kind::LinkCut => network.cut(victim)?,
            Kind::PairCut => {
                network.cut_way(victim, peer)?;
                if dice.is_multiple_of(2) {
                    network.cut_way(peer, victim)?;
                }
            }
            _ => {
                if !network.delay(victim, 20) {
                    network.cut(victim)?;
                    return Ok(State::Down { until: Instant::now() + Duration::from_millis(200 + dice % 1000) });
                }
            }
        }
        Ok(State::Done)
    }
}
