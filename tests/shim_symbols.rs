//! The compiled C++ half must contain no virtual table of a class whose definition is not ours: the Gloo headers in
//! `src/collective/c10d/gloo` are declarations only, and a table made from them would be wrong.
#![allow(missing_docs)]

use std::path::PathBuf;
use std::process::Command;

#[test]
fn the_shim_emits_no_virtual_tables_of_gloo() {
    let shim = newest_shim();
    let output =
        Command::new("nm").args(["--demangle", "--defined-only"]).arg(&shim).output().expect("nm, of binutils");
    assert!(output.status.success(), "nm failed: {}", String::from_utf8_lossy(&output.stderr));
    let symbols = String::from_utf8_lossy(&output.stdout);
    assert!(symbols.contains("sft_sync::gloo_group"), "this is not the shim: {}", shim.display());
    let strange: Vec<&str> = symbols
        .lines()
        .filter(|line| line.contains("vtable for") || line.contains("typeinfo for"))
        .filter(|line| ["gloo::", "GlooStore", "ProcessGroupGloo"].iter().any(|name| line.contains(name)))
        .collect();
    assert!(strange.is_empty(), "{strange:#?}");
}

/// The archive that the build script has made last, found beside this test.
fn newest_shim() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let profile = program.parent().and_then(|deps| deps.parent()).unwrap();
    let mut found: Vec<PathBuf> = std::fs::read_dir(profile.join("build"))
        .unwrap()
        .filter_map(|entry| Some(entry.ok()?.path().join("out/libsft_sync_shim.a")))
        .filter(|path| path.exists())
        .collect();
    found.sort_by_key(|path| path.metadata().and_then(|data| data.modified()).unwrap());
    found.pop().expect("the build script makes the shim")
}
