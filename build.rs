//! Compiles the C++ half of `src/collective/c10d` against the libtorch that `torch-sys` has found.

use std::env;
use std::path::{Path, PathBuf};
use std::process::exit;

const SHIM: &str = "src/collective/c10d/shim.cc";

fn main() {
    println!("cargo:rerun-if-changed=src/collective/c10d.rs");
    println!("cargo:rerun-if-changed=src/collective/c10d");
    if env::var_os("CARGO_FEATURE_DOC_ONLY").is_some() {
        return;
    }
    let lib = library_folder();
    let include = include_folders(&lib);
    compile(&include);
    link(&lib);
}

/// `torch-sys` says where the library is, and only to crates that depend on it directly.
fn library_folder() -> PathBuf {
    match env::var_os("DEP_TCH_LIBTORCH_LIB") {
        Some(lib) => PathBuf::from(lib),
        None => fail("torch-sys did not say where libtorch is: it supports Linux and macOS here"),
    }
}

/// The headers lie beside the library, except where `LIBTORCH_INCLUDE` says otherwise.
fn include_folders(lib: &Path) -> Vec<PathBuf> {
    println!("cargo:rerun-if-env-changed=LIBTORCH_INCLUDE");
    let root = match env::var_os("LIBTORCH_INCLUDE") {
        Some(root) if env::var_os("LIBTORCH_USE_PYTORCH").is_none() => PathBuf::from(root),
        _ => lib.parent().unwrap_or(lib).to_path_buf(),
    };
    let include = root.join("include");
    let gloo = "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp";
    if !include.join(gloo).exists() {
        fail(&format!(
            "{} has no {gloo}: install PyTorch and set LIBTORCH_USE_PYTORCH=1 with its Python first on PATH, or point \
             LIBTORCH (or LIBTORCH_INCLUDE) at a libtorch built with distributed support",
            include.display()
        ));
    }
    vec![include.clone(), include.join("torch/csrc/api/include")]
}

fn compile(include: &[PathBuf]) {
    println!("cargo:rerun-if-env-changed=LIBTORCH_CXX11_ABI");
    let abi = env::var("LIBTORCH_CXX11_ABI").unwrap_or_else(|_| "1".into());
    let mut build = cxx_build::bridge("src/collective/c10d.rs");
    build
        .file(SHIM)
        // Declarations of the Gloo headers that libtorch does not ship; see the README there.
        .include("src/collective/c10d")
        .define("USE_C10D_GLOO", None)
        .define("_GLIBCXX_USE_CXX11_ABI", abi.as_str())
        .std("c++20")
        // The shim copies gradients: it is compiled for speed in every profile.
        .opt_level(3)
        .warnings(false)
        .flag_if_supported("-Wno-deprecated-declarations");
    for folder in include {
        build.flag(format!("-isystem{}", folder.display()));
    }
    build.compile("sft_sync_shim");
}

fn link(lib: &Path) {
    println!("cargo:rustc-link-search=native={}", lib.display());
    for name in ["torch", "torch_cpu", "c10"] {
        println!("cargo:rustc-link-lib=dylib={name}");
    }
    // For this package's own tests, examples and benches. Crates that depend on this one do the same in their own build
    // script, with the folder that this line hands them as DEP_SFT_SYNC_LIBTORCH_LIB.
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", lib.display());
    println!("cargo:libtorch_lib={}", lib.display());
}

fn fail(message: &str) -> ! {
    eprintln!("sft-sync: {message}");
    println!("cargo:warning=sft-sync: {message}");
    exit(1)
}
