//! The command line, and what a launcher says through the environment.

use std::path::PathBuf;

use clap::{Args, Parser};
use serde::Serialize;

use crate::Outcome;

/// Fine-tunes a small language model on several ranks.
///
/// Started by itself it starts the ranks on this machine. Started by torchrun, or by anything else that sets RANK and
/// `WORLD_SIZE`, it joins as one rank.
#[derive(Debug, Parser)]
// The launcher appends to the arguments that it was given: the last one counts.
#[command(args_override_self = true)]
pub(crate) struct Options {
    /// Ranks to start on this machine.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) ranks: u16,

    /// Instruction data in JSON Lines, each line {"prompt": "...", "response": "..."}; a small file is built in.
    #[arg(long, value_name = "FILE")]
    pub(crate) data: Option<PathBuf>,

    /// Where the trained adapters go (safetensors); unless told, into a new temporary directory.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,

    /// Threads that each rank computes and hashes on.
    ///
    /// One makes a rank's results independent of the number of cores, and does not suffer on a busy machine.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..))]
    pub(crate) threads: u8,

    /// Does not run the same batches on one rank first to compare the losses.
    #[arg(long)]
    pub(crate) no_compare: bool,

    /// Rank 0 writes the loss of each step and a summary into this directory.
    #[arg(long, value_name = "DIR")]
    pub(crate) report: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) training: Training,
}

/// What must be the same on every rank, and is checked to be.
#[derive(Clone, Debug, Args, Serialize)]
pub(crate) struct Training {
    /// Optimizer steps.
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) steps: u64,

    /// Examples in a global batch, over all ranks and micro-batches.
    #[arg(long, default_value_t = 16, value_parser = positive)]
    pub(crate) batch: usize,

    /// Micro-batches that each rank's share of a batch is split into.
    #[arg(long, default_value_t = 2, value_parser = positive)]
    pub(crate) accumulation: usize,

    /// Learning rate.
    #[arg(long, default_value_t = 4e-3, value_parser = learning_rate)]
    pub(crate) lr: f64,

    /// The base, the adapters and the order of the batches follow from it.
    #[arg(long, default_value_t = 17, value_parser = clap::value_parser!(u32))]
    pub(crate) seed: u32,

    /// The longest example, in bytes of prompt and response; longer ones are refused.
    #[arg(long, default_value_t = 320, value_parser = clap::value_parser!(u16).range(8..))]
    pub(crate) context: u16,

    /// Makes the loss of the last rank NaN in this step, counted from 0: all ranks skip it together.
    #[arg(long, value_name = "STEP")]
    pub(crate) break_step: Option<u64>,
}

impl Options {
    /// Finds out before the training that there is nowhere to write to, not after it.
    pub(crate) fn check_out(&self) -> Outcome<()> {
        let Some(path) = &self.out else { return Ok(()) };
        if path.is_dir() {
            return Err(format!("--out {}: is a directory, not a file to write", path.display()).into());
        }
        match path.parent() {
            Some(directory) if !directory.as_os_str().is_empty() && !directory.is_dir() => {
                Err(format!("--out {}: its directory does not exist", path.display()).into())
            }
            _ => Ok(()),
        }
    }
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(number) => Ok(number),
        Err(_) => Err("is not a whole number".into()),
    }
}

fn learning_rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        _ => Err("is not a number above zero".into()),
    }
}

/// One variable is enough to tell: if the other is missing, the session names it.
pub(crate) fn started_by_launcher() -> bool {
    ["RANK", "WORLD_SIZE"].iter().any(|name| std::env::var_os(name).is_some())
}

/// Who speaks, at the start of an error message.
pub(crate) fn who() -> String {
    match std::env::var("RANK") {
        Ok(rank) => format!("sft, rank {rank}"),
        Err(_) => "sft".to_string(),
    }
}
