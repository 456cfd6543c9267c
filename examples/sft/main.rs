//! Supervised fine-tuning of a small language model on several ranks, from one command:
//!
//! ```text
//! cargo run --example sft -- --ranks 2
//! torchrun --no-python --nproc-per-node 2 target/debug/examples/sft --steps 20
//! ```
//!
//! The model reads bytes. Its base is frozen and drawn at random from the seed: a real run would load weights there,
//! and nothing else would change. What is trained are low-rank adapters, on instruction data in JSON Lines
//! (`{"prompt": "...", "response": "..."}`), with a loss over the bytes of the responses only.
//!
//! What to look at, in the order of a training loop of your own:
//!
//! - `worker.rs`: one rank. All of `sft-sync` is here: connect, check, broadcast, train, check again, save.
//! - `model.rs`: the model, with an adapter that only some ranks use in a step, and one that nobody ever uses.
//! - `data.rs`: reading the file; global batches that follow from the seed alone, and each rank's share of them.
//! - `launch.rs`: starting the ranks on this machine, and comparing their losses with those of a single rank.

mod data;
mod launch;
mod model;
mod options;
mod progress;
mod report;
mod worker;

use std::process::ExitCode;

use clap::Parser;

use crate::data::Dataset;
use crate::options::Options;

/// What can go wrong ends the program with a message; nothing here is handled by its type.
type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error}", options::who());
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Outcome<()> {
    // Before anything is started: a bad line costs a second, not a training run.
    let dataset = Dataset::load(options.data.as_deref(), &options.training)?;
    options.check_out()?;
    if options::started_by_launcher() { worker::run(options, &dataset) } else { launch::run(options) }
}
