//! Processes that wait for commands, and what is made of their answers.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// The ranks of one peer. They are ended when this is dropped.
pub(crate) struct Ranks(Vec<Rank>);

struct Rank {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Ranks {
    pub(crate) fn start(commands: Vec<Command>) -> Self {
        let started: Vec<Rank> = commands
            .into_iter()
            .map(|mut command| {
                command.env("OMP_NUM_THREADS", "1").env("TORCH_CPP_LOG_LEVEL", "ERROR");
                let mut child =
                    command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the rank should start");
                let commands = child.stdin.take().expect("it is piped");
                let answers = BufReader::new(child.stdout.take().expect("it is piped"));
                Rank { child, commands, answers }
            })
            .collect();
        let mut ranks = Self(started);
        for rank in &mut ranks.0 {
            assert_eq!(rank.answer().trim(), "ready");
        }
        ranks
    }

    /// Seconds of the slowest rank.
    pub(crate) fn measure(&mut self, command: &str) -> f64 {
        for rank in &mut self.0 {
            writeln!(rank.commands, "{command}").and_then(|()| rank.commands.flush()).expect("the rank reads");
        }
        self.0.iter_mut().map(|rank| rank.answer().trim().parse::<f64>().expect("seconds")).fold(0.0, f64::max)
    }
}

impl Rank {
    fn answer(&mut self) -> String {
        let mut line = String::new();
        let read = self.answers.read_line(&mut line).expect("the rank writes");
        assert!(read > 0, "a rank has ended");
        line
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.0 {
            // It may have ended by itself.
            let _ = rank.child.kill();
            let _ = rank.child.wait();
        }
    }
}

/// What was measured of one thing, in seconds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    pub(crate) fn push(&mut self, seconds: f64) {
        self.0.push(seconds);
    }

    fn quantile(&self, part: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        // A small index.
        let index = ((sorted.len() - 1) as f64 * part).round() as usize;
        sorted[index]
    }

    pub(crate) fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// Distance of the quartiles over the median.
    pub(crate) fn spread(&self) -> f64 {
        (self.quantile(0.75) - self.quantile(0.25)) / self.median()
    }
}

impl From<Vec<f64>> for Samples {
    fn from(samples: Vec<f64>) -> Self {
        Self(samples)
    }
}
