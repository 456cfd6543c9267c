//! What rank 0 shows while it trains.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::worker::Step;

/// A line every so many steps, where no bar can be drawn.
const EVERY: u64 = 10;

/// Silent, lines, or a bar.
pub(crate) enum Progress {
    Silent,
    Lines { label: String, steps: u64 },
    Bar(ProgressBar),
}

impl Progress {
    /// Only rank 0 speaks.
    pub(crate) fn new(rank: usize, world_size: usize, steps: u64) -> Self {
        if rank != 0 {
            return Self::Silent;
        }
        let label = if world_size == 1 { "1 rank".to_string() } else { format!("{world_size} ranks") };
        if !std::io::stderr().is_terminal() {
            return Self::Lines { label, steps };
        }
        let style = ProgressStyle::with_template("{prefix:>8} {bar:30} {pos}/{len} {msg}");
        let bar = ProgressBar::new(steps).with_prefix(label);
        Self::Bar(match style {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        })
    }

    pub(crate) fn show(&self, index: u64, step: &Step) {
        match self {
            Self::Silent => {}
            Self::Lines { label, steps } => {
                let last = index + 1 == *steps;
                if index.is_multiple_of(EVERY) || last || step.loss.is_none() {
                    eprintln!("[{label}] step {}/{steps}: {}", index + 1, describe(step));
                }
            }
            Self::Bar(bar) => {
                bar.set_message(describe(step));
                bar.inc(1);
            }
        }
    }

    pub(crate) fn finish(&self) {
        if let Self::Bar(bar) = self {
            bar.finish();
        }
    }
}

fn describe(step: &Step) -> String {
    let loss = step.loss.map_or("skipped, a loss was not finite".to_string(), |loss| format!("loss {loss:.4}"));
    let rate = per_second(step.tokens, step.took);
    format!("{loss}, {rate:.0} tokens/s, {:.1}% synchronizing", 100.0 * share(step.synchronizing, step.took))
}

#[allow(clippy::cast_precision_loss)] // For people to read.
fn per_second(count: u64, time: Duration) -> f64 {
    count as f64 / time.as_secs_f64().max(1e-9)
}

/// The part of `whole` that `part` is.
pub(crate) fn share(part: Duration, whole: Duration) -> f64 {
    part.as_secs_f64() / whole.as_secs_f64().max(1e-9)
}
