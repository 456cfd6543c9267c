//! The crate beside the engine underneath and beside PyTorch, in one run: `make bench`.
//!
//! Ranks are processes that wait for commands. What is compared is measured in turn, so that drift of the machine cancels
//! out, and reported as ratios of medians. Prints a table and writes `target/bench.json`.

mod control;
mod harness;
mod worker;
mod workload;

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Parser, Subcommand};
use serde::Serialize;

use crate::harness::{Ranks, Samples};
use crate::workload::Workload;

#[derive(Parser)]
struct Options {
    #[command(subcommand)]
    role: Option<Role>,
    /// Only rows whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Subcommand)]
enum Role {
    /// One rank; started by the bench itself.
    #[command(hide = true)]
    Worker { rank: usize, store: PathBuf },
}

/// A row of the table and of `bench.json`.
#[derive(Serialize)]
struct Row {
    name: String,
    value: f64,
    unit: &'static str,
    higher_is_better: bool,
    #[serde(skip)]
    spread: f64,
    #[serde(skip)]
    detail: String,
}

#[derive(Default)]
struct Table(Vec<Row>);

impl Table {
    /// A ratio of medians. `detail` says what was divided by what.
    fn ratio(&mut self, name: String, over: (&str, &Samples), under: (&str, &Samples), higher_is_better: bool) {
        let detail =
            format!("{} {} / {} {}", over.0, milliseconds(over.1.median()), under.0, milliseconds(under.1.median()));
        let (value, spread) = (over.1.median() / under.1.median(), over.1.spread().max(under.1.spread()));
        self.push(Row { name, value, unit: "ratio", higher_is_better, spread, detail });
    }

    fn push(&mut self, row: Row) {
        println!("{:<38} {:>9.3} {:<6} {:>5.0}%  {}", row.name, row.value, row.unit, row.spread * 100.0, row.detail);
        self.0.push(row);
    }
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.2} ms", seconds * 1e3)
}

fn main() {
    let options = Options::parse();
    match &options.role {
        Some(Role::Worker { rank, store }) => worker::run(*rank, store),
        None => compare(&options.only),
    }
}

fn compare(only: &str) {
    println!("{:<38} {:>9} {:<6} {:>6}  what was divided by what (medians)", "name", "value", "unit", "spread");
    let mut table = Table::default();
    if "sync broadcast memory".split(' ').any(|group| group.starts_with(only) || only.starts_with(group)) {
        data_plane(&mut table);
    }
    if "check".starts_with(only) || only.starts_with("check") {
        checks(&mut table);
    }
    if "agreement connect".split(' ').any(|group| group.starts_with(only) || only.starts_with(group)) {
        control_plane(&mut table);
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench.json");
    let json = serde_json::to_string_pretty(&table.0).expect("rows are plain");
    std::fs::write(&path, json + "\n").expect("target is writable");
    println!("written: target/bench.json");
}

/// Two ranks: ours, the raw engine, the reference's steps in PyTorch, and DDP.
fn data_plane(table: &mut Table) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut ours = Ranks::start(own_ranks(folder.path()));
    let mut torch = Ranks::start(python_ranks(folder.path()));
    for workload in Workload::ALL {
        let name = workload.name();
        let rounds = if workload == Workload::Full { 11 } else { 41 };
        let mut samples: Vec<(&str, String, Samples)> = [
            ("ours", format!("ours {name}")),
            ("step", format!("step {name}")),
            ("raw", format!("raw {name}")),
            ("broadcast", format!("broadcast {name}")),
            ("raw_broadcast", format!("raw_broadcast {name}")),
            ("reference", format!("reference {name}")),
            ("view_sync", format!("ddp {name} 1 1")),
            ("view_local", format!("ddp {name} 1 0")),
            ("copy_sync", format!("ddp {name} 0 1")),
            ("copy_local", format!("ddp {name} 0 0")),
        ]
        .map(|(key, command)| (key, command, Samples::default()))
        .into();
        for round in 0..=rounds {
            for (key, command, samples) in &mut samples {
                let python = ["reference", "view_sync", "view_local", "copy_sync", "copy_local"].contains(key);
                let seconds = if python { torch.measure(command) } else { ours.measure(command) };
                // The first round warms up.
                if round > 0 {
                    samples.push(seconds);
                }
            }
        }
        let of =
            |key: &str| samples.iter().find(|(name, ..)| *name == key).map(|(.., samples)| samples).expect("a key");
        let ddp = [("view_sync", "view_local"), ("copy_sync", "copy_local")]
            .map(|(sync, local)| of(sync).median() - of(local).median())
            .into_iter()
            .fold(f64::INFINITY, f64::min);
        let ddp = Samples::from(vec![ddp]);
        table.ratio(format!("sync.{name}.vs_raw"), ("ours", of("ours")), ("raw", of("raw")), false);
        table.ratio(format!("sync.{name}.vs_reference"), ("reference", of("reference")), ("ours", of("ours")), true);
        table.ratio(format!("sync.{name}.vs_ddp"), ("DDP", &ddp), ("ours", of("ours")), true);
        if workload == Workload::Full {
            table.ratio(format!("sync.{name}.step.vs_ddp"), ("DDP", &ddp), ("ours", of("step")), true);
            table.ratio(
                format!("broadcast.{name}.vs_raw"),
                ("ours", of("broadcast")),
                ("raw", of("raw_broadcast")),
                false,
            );
            let value = ours.measure(&format!("memory {name}"));
            table.push(Row {
                name: format!("memory.{name}.extra_over_gradients"),
                value,
                unit: "ratio",
                higher_is_better: false,
                spread: 0.0,
                detail: "peak of torch's allocations in a first step / bytes of the gradients".into(),
            });
        }
    }
}

/// What a check of 256 MiB costs on each of two ranks with one thread, beside a hash that never leaves the cache, a copy,
/// and the reference's check in PyTorch.
fn checks(table: &mut Table) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut ours = Ranks::start(own_ranks(folder.path()));
    let mut torch = Ranks::start(python_ranks(folder.path()));
    let names = ["check_sha256", "check_blake3", "check_fingerprint", "sha256_in_cache", "memcpy", "check"];
    let mut samples = names.map(|name| (name, Samples::default()));
    for round in 0..=9 {
        for (name, samples) in &mut samples {
            let ranks = if *name == "check" { &mut torch } else { &mut ours };
            let seconds = ranks.measure(&format!("{name} full"));
            if round > 0 {
                samples.push(seconds);
            }
        }
    }
    #[allow(clippy::cast_precision_loss)] // 2^28.
    let gigabytes = Workload::Full.nbytes() as f64 / 1e9;
    for ((_, samples), name) in samples.iter().zip([
        "check.sha256",
        "check.blake3",
        "check.fingerprint",
        "check.sha256_in_cache",
        "check.memcpy",
        "check.reference",
    ]) {
        table.push(Row {
            name: name.into(),
            value: gigabytes / samples.median(),
            unit: "GB/s",
            higher_is_better: true,
            spread: samples.spread(),
            detail: format!("256 MiB in {}", milliseconds(samples.median())),
        });
    }
    let (agreement, gather) = control::compare_digests(64, 7);
    table.ratio(
        "check.compare_1000_at_64.vs_all_gather".into(),
        ("all_gather", &Samples::from(gather)),
        ("agreement", &Samples::from(agreement)),
        true,
    );
}

/// Many ranks as threads of this process.
fn control_plane(table: &mut Table) {
    for (world, reduces) in [(8, 1000), (32, 300), (64, 100)] {
        let control = control::measure(world, 1000, reduces);
        let (agreement, barrier) = (Samples::from(control.agreement), Samples::from(control.barrier));
        let all_reduce = Samples::from(control.all_reduce);
        table.ratio(format!("agreement.{world}.vs_barrier"), ("agreement", &agreement), ("barrier", &barrier), false);
        table.ratio(
            format!("agreement.{world}.vs_all_reduce"),
            ("all_reduce of 256 bytes", &all_reduce),
            ("agreement", &agreement),
            true,
        );
        table.push(connect_row(world, control.connect, "from the first to the last rank".into()));
    }
    // Gloo ends the process when it runs out of file descriptors, so what does not fit is not tried.
    for world in [128, 256] {
        match control::connect(world) {
            Some((seconds, sockets)) => {
                table.push(connect_row(world, seconds, format!("{sockets} sockets in the process")));
            }
            None => println!("connect.{world}.seconds: skipped, the limit of open files is too low for so many ranks"),
        }
    }
}

fn connect_row(world: usize, seconds: f64, detail: String) -> Row {
    Row {
        name: format!("connect.{world}.seconds"),
        value: seconds,
        unit: "s",
        higher_is_better: false,
        spread: 0.0,
        detail,
    }
}

fn own_ranks(folder: &Path) -> Vec<Command> {
    let program = std::env::current_exe().expect("this program has a path");
    (0..2)
        .map(|rank: usize| {
            let mut command = Command::new(&program);
            command.arg("worker").arg(rank.to_string()).arg(folder.join("ours"));
            command
        })
        .collect()
}

fn python_ranks(folder: &Path) -> Vec<Command> {
    let python = std::env::var("SFT_SYNC_PYTHON").unwrap_or_else(|_| "python3".into());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/compare/peer.py");
    (0..2)
        .map(|rank: usize| {
            let mut command = Command::new(&python);
            command.arg(&script).arg(rank.to_string()).arg("2").arg(folder.join("torch"));
            command
        })
        .collect()
}
