//! Ranks in network namespaces of their own, joined by a bridge in another one: links between them can be cut. Needs root
//! and iproute2; touches nothing outside the namespaces that it makes.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::{io, process};

/// In front of every name, with the process id behind it.
const PREFIX: &str = "sftchaos";
/// The interface of each rank.
pub(crate) const INTERFACE: &str = "eth0";

static COUNT: AtomicUsize = AtomicUsize::new(0);
/// iproute2 sets its folder up when it makes a namespace; two at a time get in each other's way.
static MAKING: Mutex<()> = Mutex::new(());

pub(crate) struct Network {
    name: String,
    made: Vec<String>,
}

impl Network {
    /// Why it cannot be done on this machine, if it cannot.
    pub(crate) fn probe() -> Result<(), String> {
        let network = Self::new(1).map_err(|error| error.to_string())?;
        let status = network.command(0, Path::new("true")).status().map_err(|error| error.to_string())?;
        if status.success() { Ok(()) } else { Err("a program cannot be run in a namespace".into()) }
    }

    pub(crate) fn new(world: usize) -> io::Result<Self> {
        let _one_at_a_time = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
        remove_leftovers();
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let mut network = Self { name: format!("{PREFIX}{}x{number}", process::id()), made: Vec::new() };
        let switch = network.switch();
        network.make(switch.clone())?;
        ip(&["-n", &switch, "link", "add", "bridge", "type", "bridge"])?;
        ip(&["-n", &switch, "link", "set", "bridge", "up"])?;
        for rank in 0..world {
            let space = network.space(rank);
            network.make(space.clone())?;
            let port = port(rank);
            ip(&["link", "add", INTERFACE, "netns", &space, "type", "veth", "peer", "name", &port, "netns", &switch])?;
            ip(&["-n", &switch, "link", "set", &port, "master", "bridge", "up"])?;
            ip(&["-n", &space, "address", "add", &format!("{}/24", address(rank)), "dev", INTERFACE])?;
            ip(&["-n", &space, "link", "set", INTERFACE, "up"])?;
            ip(&["-n", &space, "link", "set", "lo", "up"])?;
        }
        Ok(network)
    }

    fn make(&mut self, name: String) -> io::Result<()> {
        ip(&["netns", "add", &name])?;
        self.made.push(name);
        Ok(())
    }

    fn switch(&self) -> String {
        format!("{}s", self.name)
    }

    fn space(&self, rank: usize) -> String {
        format!("{}r{rank}", self.name)
    }

    /// A program in the rank's namespace. It keeps the process id of what is started.
    pub(crate) fn command(&self, rank: usize, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.space(rank)]).arg(program);
        command
    }

    /// Takes the rank's link down at the bridge.
    pub(crate) fn cut(&self, rank: usize) -> io::Result<()> {
        ip(&["-n", &self.switch(), "link", "set", &port(rank), "down"])
    }

    pub(crate) fn mend(&self, rank: usize) -> io::Result<()> {
        ip(&["-n", &self.switch(), "link", "set", &port(rank), "up"])
    }

    /// Drops what one rank sends to another.
    pub(crate) fn cut_way(&self, from: usize, to: usize) -> io::Result<()> {
        ip(&["-n", &self.space(from), "route", "add", "blackhole", &format!("{}/32", address(to))])
    }

    /// Holds back each packet that reaches the rank; `false` where the kernel cannot.
    pub(crate) fn delay(&self, rank: usize, ms: u64) -> bool {
        let delay = format!("{ms}ms");
        let arguments = ["-n", &self.switch(), "qdisc", "add", "dev", &port(rank), "root", "netem", "delay", &delay];
        Command::new("tc").args(arguments).output().is_ok_and(|output| output.status.success())
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in &self.made {
            // The interfaces go with it. There is nobody to tell if it fails.
            let _ = ip(&["netns", "delete", name]);
        }
    }
}

pub(crate) fn address(rank: usize) -> String {
    format!("10.213.77.{}", rank + 1)
}

fn port(rank: usize) -> String {
    format!("port{rank}")
}

fn ip(arguments: &[&str]) -> io::Result<()> {
    let output = Command::new("ip").args(arguments).output()?;
    if output.status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("ip {}: {}", arguments.join(" "), message.trim())))
}

/// Deletes namespaces of controllers that were killed.
fn remove_leftovers() {
    let Ok(output) = Command::new("ip").args(["netns", "list"]).output() else { return };
    for name in String::from_utf8_lossy(&output.stdout).lines().filter_map(|line| line.split_whitespace().next()) {
        let owner = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('x')).map(|(owner, _)| owner);
        if let Some(owner) = owner
            && owner.parse::<u32>().is_ok()
            && !Path::new("/proc").join(owner).exists()
        {
            let _ = ip(&["netns", "delete", name]);
        }
    }
}
