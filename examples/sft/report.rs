//! What a run leaves behind for the launcher: the loss of each step, exactly, and a summary.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::Outcome;

const LOSSES: &str = "losses.txt";
const SUMMARY: &str = "summary.json";
const SKIPPED: &str = "skipped";

/// The results of a run, the same on every rank.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Summary {
    /// Ranks.
    pub(crate) world_size: usize,
    /// Loss per token of the held-out examples before the first step.
    pub(crate) held_out_before: f64,
    /// The same after the last one.
    pub(crate) held_out_after: f64,
    /// Part of the steps' time spent synchronizing, on rank 0.
    pub(crate) synchronizing: f64,
    /// Where the adapters are.
    pub(crate) adapters: String,
}

/// Global loss per token of each step; `None` where the step was skipped.
pub(crate) type Losses = Vec<Option<f64>>;

/// Writes both into a directory that exists.
pub(crate) fn write(directory: &Path, losses: &Losses, summary: &Summary) -> Outcome<()> {
    // `{:?}` prints the shortest text that reads back as the same bits.
    let lines: String =
        losses.iter().map(|loss| loss.map_or(format!("{SKIPPED}\n"), |loss| format!("{loss:?}\n"))).collect();
    std::fs::write(directory.join(LOSSES), lines)?;
    std::fs::write(directory.join(SUMMARY), serde_json::to_vec_pretty(summary)?)?;
    Ok(())
}

/// Reads what [`write`] has written.
pub(crate) fn read(directory: &Path) -> Outcome<(Losses, Summary)> {
    let text = std::fs::read_to_string(directory.join(LOSSES))?;
    let losses = text
        .lines()
        .map(|line| if line == SKIPPED { Ok(None) } else { line.parse().map(Some) })
        .collect::<Result<Losses, _>>()?;
    let summary = serde_json::from_slice(&std::fs::read(directory.join(SUMMARY))?)?;
    Ok((losses, summary))
}

/// How far apart two runs are, step by step.
pub(crate) fn differences(one: &Losses, other: &Losses) -> Outcome<Vec<f64>> {
    if one.len() != other.len() {
        return Err(format!("one run made {} steps and the other {}", one.len(), other.len()).into());
    }
    let difference = |(step, pair): (usize, (&Option<f64>, &Option<f64>))| match pair {
        (Some(one), Some(other)) => Ok((one - other).abs()),
        (None, None) => Ok(0.0),
        _ => Err(format!("one run skipped step {step} and the other did not").into()),
    };
    one.iter().zip(other).enumerate().map(difference).collect()
}
