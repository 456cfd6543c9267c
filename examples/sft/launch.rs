//! Starts the ranks on this machine, and sees to it that none is left behind.

use std::ffi::OsStr;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::Outcome;
use crate::options::Options;
use crate::report::{self, Losses, Summary};

/// How far the loss of N ranks may be from that of one in a step.
///
/// Not zero: N ranks add float32 gradients in another order and pad to other lengths, which changes the last bits, and
/// `AdamW` divides by the gradient's own size, so that where a gradient is next to nothing a last bit can decide the sign
/// of an update; such differences grow from step to step. With the defaults they came to 3e-8 in the first steps and to
/// 8e-6 within 40. Dividing by each rank's own number of tokens, an easy mistake, came to 1e-3 within 10.
#[allow(clippy::cast_precision_loss)] // Steps are few.
fn tolerance(step: usize) -> f64 {
    1e-4 + 1e-5 * step as f64
}

/// Time for the others to end with an error of their own after one rank has failed.
const GRACE: Duration = Duration::from_secs(3);
const POLL: Duration = Duration::from_millis(20);

/// Tells a rank who has started it.
const LAUNCHER: &str = "SFT_LAUNCHER_PID";

/// Runs the whole demonstration.
pub(crate) fn run(options: &Options) -> Outcome<()> {
    let directory = tempfile::tempdir()?;
    let ranks = usize::from(options.ranks);
    let compares = ranks > 1 && !options.no_compare;
    let one = if compares {
        eprintln!("one rank first, on the same global batches");
        let report = directory.path().join("one");
        Some(run_ranks(1, &report, Some(&directory.path().join("one.safetensors")))?)
    } else {
        None
    };
    let report = directory.path().join("all");
    let (losses, summary) = run_ranks(ranks, &report, None)?;
    if let Some(to) = &options.report {
        std::fs::create_dir_all(to)?;
        report::write(to, &losses, &summary)?;
    }
    let comparison = match one {
        Some((one, _)) => compare(&one, &losses)?,
        None => "not compared with one rank".to_string(),
    };
    println!(
        "demo: ok: {ranks} {}, {} steps, held-out loss {:.4} -> {:.4}, {comparison}, \
         {:.1}% of the time synchronizing",
        if ranks == 1 { "rank" } else { "ranks" },
        losses.len(),
        summary.held_out_before,
        summary.held_out_after,
        100.0 * summary.synchronizing
    );
    Ok(())
}

fn compare(one: &Losses, all: &Losses) -> Outcome<String> {
    let differences = report::differences(one, all)?;
    let largest = differences.iter().copied().fold(0.0, f64::max);
    println!("one rank and all ranks: losses differ by at most {largest:.1e} in a step");
    for (step, difference) in differences.into_iter().enumerate() {
        let tolerance = tolerance(step);
        if difference > tolerance {
            let text =
                format!("step {step}: the loss differs from one rank's by {difference:.1e}, over {tolerance:.1e}");
            return Err(text.into());
        }
    }
    Ok(format!("losses within {largest:.1e} of one rank's"))
}

/// Starts so many ranks, waits for them, and reads what rank 0 has written.
fn run_ranks(ranks: usize, report: &Path, out: Option<&Path>) -> Outcome<(Losses, Summary)> {
    std::fs::create_dir(report)?;
    let port = free_port()?;
    let mut running = Ranks(Vec::new());
    for rank in 0..ranks {
        let child = command(rank, ranks, port, report, out)?.spawn();
        running.0.push(child.map_err(|error| format!("rank {rank} could not be started: {error}"))?);
    }
    running.wait()?;
    report::read(report)
}

fn command(rank: usize, ranks: usize, port: u16, report: &Path, out: Option<&Path>) -> Outcome<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(std::env::args_os().skip(1)).args([OsStr::new("--report"), report.as_os_str()]);
    if let Some(out) = out {
        // Only a yardstick: its results are not shown.
        command.args([OsStr::new("--out"), out.as_os_str()]).stdout(Stdio::null());
    }
    command
        .env("RANK", rank.to_string())
        .env("LOCAL_RANK", rank.to_string())
        .env("WORLD_SIZE", ranks.to_string())
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string())
        .env(LAUNCHER, std::process::id().to_string())
        .env_remove("TORCHELASTIC_USE_AGENT_STORE")
        .env_remove("TORCHELASTIC_RESTART_COUNT");
    Ok(command)
}

/// Free a moment ago: rank 0 binds it next.
fn free_port() -> Outcome<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// Ranks that are running. Those that still are when this is dropped are killed.
struct Ranks(Vec<Child>);

impl Ranks {
    /// Waits for all; after the first failure, not for long.
    fn wait(&mut self) -> Outcome<()> {
        let mut failed: Option<(Instant, String)> = None;
        loop {
            let statuses: Vec<Option<ExitStatus>> = self.0.iter_mut().map(Child::try_wait).collect::<Result<_, _>>()?;
            let broken = statuses.iter().position(|status| status.is_some_and(|status| !status.success()));
            if let (None, Some(rank), Some(Some(status))) = (&failed, broken, broken.map(|rank| statuses[rank])) {
                failed = Some((Instant::now(), format!("rank {rank} failed ({status})")));
            }
            let finished = statuses.iter().all(Option::is_some);
            match failed {
                None if finished => return Ok(()),
                Some((since, message)) if finished || since.elapsed() > GRACE => return Err(message.into()),
                _ => std::thread::sleep(POLL),
            }
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // An error says that it has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Ends this rank when the launcher ends, however it ends: nothing is left running. Under another launcher it does
/// nothing.
pub(crate) fn die_with_launcher() -> Outcome<()> {
    let Ok(launcher) = std::env::var(LAUNCHER) else { return Ok(()) };
    #[cfg(target_os = "linux")]
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
    // It may have ended before the line above.
    if launcher != std::os::unix::process::parent_id().to_string() {
        return Err("the launcher has ended".into());
    }
    Ok(())
}
