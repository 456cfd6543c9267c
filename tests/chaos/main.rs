//! Seeded random scenarios: real processes, a real small training loop, and one fault each.
//!
//! Without arguments, as `cargo test` calls it, one scenario of each kind of fault. `--count N` runs that many random
//! ones, `--seed S` begins at another seed, `--only SEED` replays a single one and shows what every rank wrote down if
//! it fails.

mod checks;
mod controller;
mod model;
mod netns;
mod record;
mod reference;
mod scenario;
mod train;
mod worker;

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Instant;

use clap::{Parser, Subcommand};
use sft_sync::Operation;

use crate::controller::Report;
use crate::netns::Network;
use crate::reference::References;
use crate::scenario::{Caller, Kind, Scenario};

#[derive(Parser)]
struct Arguments {
    /// How many scenarios to run.
    #[arg(long)]
    count: Option<u64>,
    /// The seed of the first one; the others have the seeds after it.
    #[arg(long)]
    seed: Option<u64>,
    /// Runs the scenario with this seed.
    #[arg(long, conflicts_with_all = ["count", "seed"])]
    only: Option<u64>,
    /// Runs one scenario of each kind of fault.
    #[arg(long)]
    fast: bool,
    /// How many scenarios run at a time.
    #[arg(long, default_value_t = 3)]
    jobs: usize,
    #[command(flatten)]
    harness: Harness,
    #[command(subcommand)]
    role: Option<Role>,
}

/// What `cargo test` may hand to every test program.
#[derive(clap::Args)]
#[allow(clippy::struct_excessive_bools)] // They are flags.
struct Harness {
    #[arg(hide = true)]
    filters: Vec<String>,
    #[arg(long, hide = true)]
    nocapture: bool,
    #[arg(long, hide = true)]
    no_capture: bool,
    #[arg(long, short, hide = true)]
    quiet: bool,
    #[arg(long, hide = true)]
    list: bool,
    #[arg(long, hide = true)]
    test_threads: Option<usize>,
}

#[derive(Subcommand)]
enum Role {
    /// One rank of a scenario; the program starts it itself.
    #[command(hide = true)]
    Rank { folder: PathBuf, rank: usize },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Some(Role::Rank { folder, rank }) = arguments.role {
        worker::run(&folder, rank);
        return ExitCode::SUCCESS;
    }
    if arguments.harness.list {
        println!("chaos: test");
        return ExitCode::SUCCESS;
    }
    let filters = &arguments.harness.filters;
    if !filters.is_empty() && !filters.iter().any(|filter| "chaos".contains(filter.as_str())) {
        return ExitCode::SUCCESS;
    }

    tch::set_num_threads(1);
    let network = match Network::probe() {
        Ok(()) => true,
        Err(reason) => {
            println!("links between network namespaces: skipped, other faults take their place ({reason})");
            false
        }
    };
    let first = arguments.seed.unwrap_or(1);
    let scenarios: Vec<Scenario> = if let Some(seed) = arguments.only {
        vec![Scenario::new(seed, network)]
    } else if arguments.fast || (arguments.count.is_none() && arguments.seed.is_none()) {
        one_of_each(first, network)
    } else {
        (first..)
            .take(usize::try_from(arguments.count.unwrap_or(200)).unwrap_or(200))
            .map(|seed| Scenario::new(seed, network))
            .collect()
    };
    let passed = run_all(scenarios, arguments.jobs.max(1), arguments.only.is_some());
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The first scenario of each kind, but for those that wait long or take many processes.
fn one_of_each(first: u64, network: bool) -> Vec<Scenario> {
    let mut found: BTreeMap<Kind, Scenario> = BTreeMap::new();
    let wanted = Kind::ALL.iter().filter(|kind| network || !kind.needs_network()).count();
    for scenario in (first..).map(|seed| Scenario::new(seed, network)) {
        if scenario.world <= 4 && !matches!(scenario.at.operation, Operation::Connect | Operation::Shutdown) {
            found.entry(scenario.kind).or_insert(scenario);
        }
        if found.len() == wanted {
            break;
        }
    }
    found.into_values().collect()
}

fn run_all(scenarios: Vec<Scenario>, jobs: usize, show_evidence: bool) -> bool {
    let start = Instant::now();
    let references = References::default();
    let queue = Mutex::new(VecDeque::from(scenarios));
    let (sender, reports) = mpsc::channel();
    let mut totals = Totals::default();
    thread::scope(|scope| {
        for _ in 0..jobs {
            let (sender, queue, references) = (sender.clone(), &queue, &references);
            scope.spawn(move || {
                loop {
                    let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                    let Some(scenario) = next else { break };
                    if sender.send(controller::run(scenario, references)).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        for report in reports {
            show(&report, show_evidence);
            totals.count(&report);
        }
    });
    totals.show(start)
}

fn show(report: &Report, show_evidence: bool) {
    let Report { scenario, .. } = report;
    let verdict = if report.failures.is_empty() { "ok  " } else { "FAIL" };
    let detection = report.detection_ms.map_or_else(String::new, |ms| format!(", {ms:.0} ms"));
    let caller = match scenario.caller {
        Caller::Stops => "stops",
        Caller::Ignores => "ignores",
    };
    println!(
        "{verdict} seed {:<6} world {} {:<17} rank {} {:<7} at {}: {}{detection}",
        scenario.seed,
        scenario.world,
        scenario.kind,
        scenario.victim,
        caller,
        scenario.place(),
        report.outcome
    );
    let shown = if show_evidence { report.failures.len() } else { 6 };
    for failure in report.failures.iter().take(shown) {
        println!("       not so: {failure}");
    }
    if report.failures.len() > shown {
        println!("       and {} more", report.failures.len() - shown);
    }
    if !report.failures.is_empty() {
        println!("       replay: cargo test --features fault-injection --test chaos -- --only {}", scenario.seed);
        if show_evidence {
            println!("{scenario:#?}");
            report.evidence.iter().for_each(|line| println!("{line}"));
        }
    }
}

#[derive(Default)]
struct Totals {
    passed: usize,
    failed: usize,
    slowest_exit_ms: f64,
    by_kind: BTreeMap<Kind, OfKind>,
}

#[derive(Default)]
struct OfKind {
    passed: usize,
    failed: usize,
    slowest_ms: Option<f64>,
}

impl Totals {
    fn count(&mut self, report: &Report) {
        let kind = self.by_kind.entry(report.scenario.kind).or_default();
        if report.failures.is_empty() {
            self.passed += 1;
            kind.passed += 1;
        } else {
            self.failed += 1;
            kind.failed += 1;
        }
        self.slowest_exit_ms = self.slowest_exit_ms.max(report.exit_ms);
        if let Some(ms) = report.detection_ms {
            kind.slowest_ms = Some(kind.slowest_ms.map_or(ms, |slowest| slowest.max(ms)));
        }
    }

    fn show(&self, start: Instant) -> bool {
        println!("{:<18} {:>6} {:>6} {:>16}", "fault", "passed", "failed", "slowest seen, ms");
        for (kind, OfKind { passed, failed, slowest_ms }) in &self.by_kind {
            let slowest = slowest_ms.map_or_else(|| "-".to_string(), |ms| format!("{ms:.0}"));
            println!("{kind:<18} {passed:>6} {failed:>6} {slowest:>16}");
        }
        let slowest = self.by_kind.values().filter_map(|kind| kind.slowest_ms).fold(0.0, f64::max);
        println!("slowest detection {slowest:.0} ms, slowest end of a process {:.0} ms", self.slowest_exit_ms);
        println!("{:.0} s in all", start.elapsed().as_secs_f64());
        println!("{} passed, {} failed", self.passed, self.failed);
        self.failed == 0
    }
}
