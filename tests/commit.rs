//! `commit_checkpoint` and `verify_checkpoint`: a checkpoint is what was checked, or the one before it stands. Ranks are
//! threads; where one is killed or its disk fills, they are processes.
#![allow(missing_docs)]

mod common;

use std::os::unix::fs::{FileExt, symlink};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use common::{patterned, ranks, ranks_with};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sft_sync::fault::Point;
use sft_sync::{
    CheckpointProblem, CommitProblem, CommitRefusal, Committed, Manifest, NamedTensor, Parameters, Rendezvous, Result,
    SyncError, SyncSession, Verified, manifest_path, tensor_digest, verify_checkpoint,
};
use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor, no_grad};

/// A model whose values depend on `salt` only.
fn model(salt: usize) -> VarStore {
    let store = VarStore::new(Device::Cpu);
    let root = store.root();
    let layer = root.sub("layer");
    for (index, shape) in [vec![5, 3], vec![3], vec![], vec![0, 2]].iter().enumerate() {
        let mut variable = layer.var(&format!("p{index}"), shape, nn::Init::Const(0.0));
        no_grad(|| variable.f_copy_(&patterned(0, salt + index, shape, Kind::Float))).unwrap();
    }
    let _buffer = root.zeros_no_train("running", &[2]);
    store
}

fn check(session: &mut SyncSession, store: &VarStore) -> Verified {
    session.assert_rank_equal(Parameters::all(store).unwrap().values(), "checkpoint").unwrap()
}

/// Checks and commits.
fn commit(session: &mut SyncSession, store: &VarStore, path: &Path) -> Result<Committed> {
    let verified = check(session, store);
    session.commit_checkpoint(verified, path, |file| store.save(file))
}

/// One step: nothing is left as it was.
fn change(store: &VarStore) {
    for mut variable in store.trainable_variables() {
        let _ = no_grad(|| variable.f_add_scalar_(1.0)).unwrap();
    }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn data_name(manifest: &Manifest, stem: &str, extension: &str) -> String {
    format!("{stem}-{}.{extension}", &manifest.root.to_string()[..16])
}

/// The model as the checkpoint has it.
#[track_caller]
fn assert_is(manifest: &Manifest, salt: usize) {
    let mut loaded = model(99);
    loaded.load(manifest.data_path()).unwrap();
    manifest.check(Parameters::all(&loaded).unwrap().values()).unwrap();
    manifest.check(Parameters::all(&model(salt)).unwrap().values()).unwrap();
}

#[track_caller]
fn refusal(error: SyncError) -> CommitRefusal {
    assert!(error.is_disagreement() && !error.needs_rebuild(), "{error}");
    let SyncError::CommitRefused(refusal) = error else { panic!("{error:?}") };
    *refusal
}

#[track_caller]
fn problem(error: SyncError) -> CheckpointProblem {
    let SyncError::Checkpoint(error) = error else { panic!("{error:?}") };
    error.problem
}

/// With an old checkpoint in place, `spoiled` is refused on every rank, alike, and changes nothing.
#[track_caller]
fn refused(
    world: usize,
    spoiled: impl Fn(&mut SyncSession, &VarStore, &Path) -> Result<Committed> + Sync,
) -> CommitProblem {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let mut refusals = ranks(world, |session| {
        commit(session, &model(0), &path).unwrap();
        let store = model(1);
        let refusal = refusal(spoiled(session, &store, &path).unwrap_err());
        assert!(session.all_agree(0, true).unwrap(), "the session should go on");
        refusal
    });
    assert!(refusals.iter().all(|refusal| *refusal == refusals[0]), "{refusals:?}");
    let manifest = verify_checkpoint(manifest_path(&path)).unwrap();
    assert_is(&manifest, 0);
    let mut expected = vec![data_name(&manifest, "model", "safetensors"), "model.safetensors.json".into()];
    expected.sort();
    assert_eq!(names(folder.path()), expected, "nothing is left over");

    // And what was refused is accepted when it is right.
    ranks(world, |session| commit(session, &model(1), &path).map(drop).unwrap());
    assert_is(&verify_checkpoint(manifest_path(&path)).unwrap(), 1);
    refusals.remove(0).problem
}

#[test]
fn a_commit_is_what_was_checked_at_every_world_size() {
    for world in 1..=4 {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("adapters.v1.safetensors");
        let committed = ranks(world, |session| {
            let store = model(3);
            let parameters = Parameters::trainable(&store).unwrap();
            session.synchronize_gradients(41, &parameters).unwrap();
            commit(session, &store, &path).unwrap()
        });
        assert!(committed.iter().all(|one| *one == committed[0]), "{committed:?}");
        let manifest = verify_checkpoint(&committed[0].manifest).unwrap();
        assert_eq!(committed[0].manifest, manifest_path(&path));
        assert_eq!(committed[0].data, manifest.data_path());
        assert_eq!((committed[0].root, manifest.checked_root), (manifest.root, manifest.root));
        assert_eq!(manifest.data, data_name(&manifest, "adapters.v1", "safetensors"));
        assert_eq!((manifest.step, manifest.world_size, manifest.phase.as_str()), (Some(41), world, "checkpoint"));
        assert_eq!(manifest.crate_version, env!("CARGO_PKG_VERSION"));
        let listed: Vec<(&str, &str, &[i64])> = manifest
            .tensors
            .iter()
            .map(|tensor| (tensor.name.as_str(), tensor.dtype.as_str(), tensor.shape.as_slice()))
            .collect();
        assert_eq!(
            listed,
            [
                ("layer.p0", "float32", [5, 3].as_slice()),
                ("layer.p1", "float32", &[3]),
                ("layer.p2", "float32", &[]),
                ("layer.p3", "float32", &[0, 2]),
                ("running", "float32", &[2]),
            ]
        );
        assert_eq!(manifest.tensors[0].sha256, tensor_digest(&patterned(0, 3, &[5, 3], Kind::Float)).unwrap());
        assert_is(&manifest, 3);
    }
}

#[test]
fn commits_follow_each_other_and_the_replaced_data_goes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    // Not what a commit here would have named.
    for other in ["model-notes.safetensors", "other-0123456789abcdef.safetensors", "model-0123456789abcdef.ot"] {
        fs::write(folder.path().join(other), "kept").unwrap();
    }
    for salt in [0, 1, 1, 0] {
        ranks(2, |session| commit(session, &model(salt), &path).map(drop).unwrap());
        let manifest = verify_checkpoint(manifest_path(&path)).unwrap();
        assert_is(&manifest, salt);
        assert_eq!(names(folder.path()).len(), 5, "{:?}", names(folder.path()));
    }
    // Two of one session; a manifest that a person has broken is replaced as well.
    fs::write(manifest_path(&path), "{}").unwrap();
    ranks(3, |session| {
        commit(session, &model(2), &path).unwrap();
        commit(session, &model(4), &path).unwrap();
    });
    assert_is(&verify_checkpoint(manifest_path(&path)).unwrap(), 4);
}

#[test]
fn formats_of_libtorch_are_read_back_too() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["model.ot", "model"] {
        let path = folder.path().join(name);
        ranks(2, |session| commit(session, &model(5), &path).map(drop).unwrap());
        let manifest = verify_checkpoint(manifest_path(&path)).unwrap();
        assert_is(&manifest, 5);
        // The same tensors have the same root in every format.
        let other = folder.path().join("model.safetensors");
        ranks(1, |session| commit(session, &model(5), &other).map(drop).unwrap());
        assert_eq!(verify_checkpoint(manifest_path(&other)).unwrap().root, manifest.root);
    }
}

#[test]
fn a_relative_path_is_one() {
    // In a process of its own: the working folder is the whole process's.
    let folder = tempfile::tempdir().unwrap();
    let status = process("relative", folder.path(), 0).current_dir(folder.path()).status().unwrap();
    assert!(status.success());
    assert_is(&verify_checkpoint(folder.path().join("model.safetensors.json")).unwrap(), 1);
    assert_eq!(names(folder.path()).len(), 2, "{:?}", names(folder.path()));
}

#[test]
fn more_than_parameters_goes_into_one_check() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapters.safetensors");
    let base = || NamedTensor::from(("base", patterned(0, 9, &[7], Kind::Half)));
    let state = |step: u64| {
        [
            NamedTensor::scalar("step", step),
            NamedTensor::scalar("learning_rate", 2e-4),
            NamedTensor::scalar("frozen", true),
            NamedTensor::bytes("rng", b"\x00\x01\xff"),
            NamedTensor::from(("momentum", None::<Tensor>)),
        ]
    };
    ranks(3, |session| {
        let store = model(2);
        let everything = || Parameters::all(&store).unwrap();
        let all = everything().values().chain([base()]).chain(state(12)).collect::<Vec<_>>();
        let verified = session.assert_rank_equal(all, "checkpoint").unwrap();
        assert_eq!(verified.digests().count(), 11);
        session.commit_checkpoint(verified, &path, |file| store.save(file)).unwrap();

        // One of them differs on one rank.
        let rank = session.rank() as u64;
        let error = session.assert_rank_equal(state(12 + rank / 2), "checkpoint").unwrap_err();
        let SyncError::RanksDiffer(report) = error else { panic!("{error}") };
        assert_eq!((report.tensors.len(), report.tensors[0].name.as_str()), (1, "step"));
    });
    let manifest = verify_checkpoint(manifest_path(&path)).unwrap();
    assert_ne!(manifest.root, manifest.checked_root);
    let also: Vec<&str> = manifest.also_checked.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(also, ["base", "frozen", "learning_rate", "momentum", "rng", "step"]);
    assert_eq!(manifest.also_checked[5].kind.as_deref(), Some("int64 []"));
    assert_eq!(manifest.also_checked[4].kind.as_deref(), Some("uint8 [3]"));
    assert_eq!(manifest.also_checked[3].sha256, None);

    // On resuming: the adapters alone, or with their base and the state.
    let all =
        |step| Parameters::all(&model(2)).unwrap().values().chain([base()]).chain(state(step)).collect::<Vec<_>>();
    assert_is(&manifest, 2);
    manifest.check(all(12)).unwrap();
    let wrong = problem(manifest.check(all(13)).unwrap_err());
    assert!(matches!(&wrong, CheckpointProblem::Differs { tensor, others: 0, .. } if tensor == "step"), "{wrong}");
    let mut there = all(12);
    there.push(("momentum2", patterned(0, 0, &[1], Kind::Float)).into());
    assert_eq!(
        problem(manifest.check(there).unwrap_err()),
        CheckpointProblem::Unexpected { tensor: "momentum2".into() }
    );
    let store = model(2);
    let fewer = Parameters::all(&store).unwrap();
    let fewer = fewer.iter().filter(|(name, _)| *name != "layer.p1");
    assert_eq!(problem(manifest.check(fewer).unwrap_err()), CheckpointProblem::Missing { tensor: "layer.p1".into() });
}

/// The Python block of the README, run as it stands there.
#[test]
fn the_recipe_in_the_readme_computes_the_same_root() {
    let readme = include_str!("../README.md");
    let recipe = readme.split("```python\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    assert!(recipe.contains("def root_digest") && recipe.trim_end().lines().count() <= 20);
    let driver = r#"
import json, sys

raw = open(sys.argv[1], "rb").read()
start = 8 + int.from_bytes(raw[:8], "little")
saved = {}
for name, info in json.loads(raw[8:start]).items():
    begin, end = info["data_offsets"]
    assert info["dtype"] == "F32"
    flat = torch.frombuffer(bytearray(raw[start + begin:start + end]), dtype=torch.float32) if end > begin else torch.empty(0)
    saved[name] = flat.reshape(info["shape"])
print(root_digest(saved))

counted = torch.arange(24.0).reshape(2, 3, 4)
print(root_digest({
    "z": None,
    "strided": counted.transpose(0, 2)[1:],
    "conjugate": torch.complex(counted, -counted).conj(),
    "half": counted.bfloat16(),
    "step": torch.tensor(12),
    "rate": torch.tensor(0.5, dtype=torch.float64),
    "on": torch.tensor(True),
    "bytes": torch.tensor([0, 1, 255], dtype=torch.uint8),
    "\U0001f600\u00e9": torch.empty(0, 2),
    "\uffee": torch.ones(1),
}))
"#;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let committed = ranks(1, |session| commit(session, &model(7), &path).unwrap()).remove(0);
    let checked = ranks(2, |session| {
        let counted = Tensor::arange(24, (Kind::Float, Device::Cpu)).reshape([2, 3, 4]);
        let named: Vec<NamedTensor> = vec![
            ("z", None::<Tensor>).into(),
            ("strided", counted.transpose(0, 2).narrow(0, 1, 3)).into(),
            ("conjugate", Tensor::complex(&counted, &-&counted).conj()).into(),
            ("half", counted.to_kind(Kind::BFloat16)).into(),
            NamedTensor::scalar("step", 12_u64),
            NamedTensor::scalar("rate", 0.5),
            NamedTensor::scalar("on", true),
            NamedTensor::bytes("bytes", &[0, 1, 255]),
            ("\u{1f600}\u{e9}", Tensor::empty([0, 2], (Kind::Float, Device::Cpu))).into(),
            ("\u{ffee}", Tensor::ones([1], (Kind::Float, Device::Cpu))).into(),
        ];
        session.assert_rank_equal(named, "end").unwrap().root()
    });

    let python = env::var_os("SFT_SYNC_PYTHON").unwrap_or_else(|| "python3".into());
    let output = Command::new(&python)
        .arg("-c")
        .arg(format!("{recipe}{driver}"))
        .arg(&committed.data)
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("this test needs {}: {error}", python.display()));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "set SFT_SYNC_PYTHON to a Python that has PyTorch and numpy:\n{said}");
    let lines = String::from_utf8(output.stdout).unwrap();
    assert_eq!(lines, format!("{}\n{}\n", committed.root, checked[0]));
}

#[test]
fn a_step_between_check_and_commit_is_refused() {
    for world in 1..=4 {
        let problem = refused(world, |session, store, path| {
            let verified = check(session, store);
            change(store);
            session.commit_checkpoint(verified, path, |file| store.save(file))
        });
        let CommitProblem::Differs { tensor, checked, written, others } = problem else { panic!("{problem}") };
        // Of four trained ones, one has no elements.
        assert_eq!((tensor.as_str(), others), ("layer.p0", 2));
        assert!(checked.starts_with("float32 [5, 3] sha256") && written.starts_with("float32 [5, 3] sha256"));
        assert_ne!(checked, written);
    }
}

#[test]
fn a_tensor_that_was_not_checked_is_refused() {
    let uncovered = refused(3, |session, store, path| {
        let verified = session.assert_rank_equal(Parameters::trainable(store).unwrap().values(), "end").unwrap();
        session.commit_checkpoint(verified, path, |file| store.save(file))
    });
    assert_eq!(uncovered, CommitProblem::NotCovered { tensor: "running".into() });
    // Checked to be absent is not covered either.
    let absent = refused(2, |session, store, path| {
        let tensors = Parameters::trainable(store).unwrap();
        let tensors = tensors.values().chain([("running", None::<Tensor>).into()]);
        let verified = session.assert_rank_equal(tensors.collect::<Vec<_>>(), "end").unwrap();
        session.commit_checkpoint(verified, path, |file| store.save(file))
    });
    assert!(
        matches!(&absent, CommitProblem::Differs { tensor, checked, .. } if tensor == "running" && checked == "no tensor"),
        "{absent}"
    );
}

#[test]
fn a_failing_writer_is_the_same_error_everywhere() {
    for world in 1..=3 {
        let failed = refused(world, |session, store, path| {
            let verified = check(session, store);
            session.commit_checkpoint(verified, path, |file| {
                fs::write(file, "half a fi").unwrap();
                Err::<(), _>("no more ink")
            })
        });
        assert_eq!(failed, CommitProblem::Writer { message: "no more ink".into() });
        let panicked = refused(world, |session, store, path| {
            let verified = check(session, store);
            session.commit_checkpoint(verified, path, |file| -> Result<()> {
                store.save(file).unwrap();
                panic!("on purpose, call {}", 3)
            })
        });
        assert_eq!(panicked, CommitProblem::WriterPanicked { message: "on purpose, call 3".into() });
    }
}

#[test]
fn what_cannot_be_read_back_is_refused() {
    type Writer = fn(&Path, &VarStore);
    let writers: [(&str, Writer); 6] = [
        ("the writer made no file", |_, _| {}),
        ("0 bytes are too few", |file, _| fs::write(file, "").unwrap()),
        ("cannot be, in a file of 11", |file, _| fs::write(file, "not tensors").unwrap()),
        ("it is not a file", |file, _| fs::create_dir(file).unwrap()),
        ("it is not a file", |file, store| {
            let elsewhere = file.with_file_name("elsewhere.safetensors");
            store.save(&elsewhere).unwrap();
            symlink(&elsewhere, file).unwrap();
        }),
        ("ends within tensor", |file, store| {
            store.save(file).unwrap();
            let file = fs::File::options().write(true).open(file).unwrap();
            file.set_len(file.metadata().unwrap().len() - 1).unwrap();
        }),
    ];
    for (expected, writer) in writers {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let refusals = ranks(2, |session| {
            let store = model(1);
            let verified = check(session, &store);
            refusal(
                session
                    .commit_checkpoint(verified, &path, |file| {
                        writer(file, &store);
                        Ok::<_, String>(())
                    })
                    .unwrap_err(),
            )
        });
        assert_eq!(refusals[0], refusals[1]);
        let problem = &refusals[0].problem;
        assert!(matches!(problem, CommitProblem::Unreadable { message } if message.contains(expected)), "{problem}");
        assert!(!manifest_path(&path).exists());
    }
    let empty = refused(2, |session, store, path| {
        let verified = check(session, store);
        session.commit_checkpoint(verified, path, |file| Tensor::write_safetensors::<&str, Tensor, _>(&[], file))
    });
    assert_eq!(empty, CommitProblem::Empty);
}

#[test]
fn a_device_that_is_full_is_refused() {
    // The kernel's own "no space left on device", through the writer's own file operations.
    let full = refused(2, |session, store, path| {
        let verified = check(session, store);
        session.commit_checkpoint(verified, path, |file| {
            symlink("/dev/full", file).unwrap();
            store.save(file)
        })
    });
    assert!(matches!(&full, CommitProblem::Writer { message } if message.contains("No space left")), "{full}");
}

#[test]
fn a_token_is_spent_in_its_session_and_before_the_next_check() {
    let stale = refused(2, |session, store, path| {
        let verified = check(session, store);
        let _later = check(session, store);
        session.commit_checkpoint(verified, path, |file| store.save(file))
    });
    // Call 1 connects, 2 checks, 3 commits the old one.
    assert_eq!(stale, CommitProblem::StaleToken { check: 4, latest: 5 });

    // The same check in another session, on one rank or on all.
    for culprits in [vec![1], vec![0, 1, 2]] {
        let others = Mutex::new(ranks(3, |session| {
            commit(session, &model(0), &tempfile::tempdir().unwrap().path().join("m.ot")).unwrap();
            Some(check(session, &model(1)))
        }));
        let foreign = refused(3, |session, store, path| {
            let own = check(session, store);
            let rank = session.rank();
            let other = others.lock().unwrap()[rank].take().unwrap();
            assert_eq!((own.root(), own.call(), own.phase()), (other.root(), other.call(), other.phase()));
            let verified = if culprits.contains(&rank) { other } else { own };
            session.commit_checkpoint(verified, path, |file| store.save(file))
        });
        assert_eq!(foreign, CommitProblem::ForeignToken);
    }
}

#[test]
fn other_calls_and_other_tokens_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let errors = ranks(3, |session| {
        let store = model(1);
        let verified = check(session, &store);
        if session.rank() == 2 {
            session.sum(4, 1_u64).map(drop).unwrap_err()
        } else {
            session.commit_checkpoint(verified, &path, |file| store.save(file)).map(drop).unwrap_err()
        }
    });
    for error in errors {
        assert!(matches!(error, SyncError::Desynchronized(_)), "{error}");
        let text = error.to_string();
        assert!(text.contains("commit_checkpoint (phase \"checkpoint\"") && text.contains("rank 2: sum"), "{text}");
    }
    assert!(names(folder.path()).is_empty());
}

#[test]
fn a_path_that_cannot_be_used_is_named() {
    let folder = tempfile::tempdir().unwrap();
    for (path, expected) in [
        (folder.path().join("missing/model.safetensors"), "its folder does not exist"),
        (PathBuf::from("/"), "it has no file name"),
    ] {
        for error in ranks(2, |session| commit(session, &model(1), &path).unwrap_err()) {
            let refusal = refusal(error);
            assert!(
                matches!(&refusal.problem, CommitProblem::Path { problem, .. } if problem == expected),
                "{refusal}"
            );
        }
    }
    // A folder where the manifest should be: the data is taken away again.
    let path = folder.path().join("model.safetensors");
    fs::create_dir_all(manifest_path(&path).join("full")).unwrap();
    let refusals = ranks(2, |session| refusal(commit(session, &model(1), &path).unwrap_err()));
    assert!(
        matches!(&refusals[1].problem, CommitProblem::Io { doing, .. } if doing == "renaming the manifest"),
        "{}",
        refusals[1]
    );
    assert_eq!(refusals[0], refusals[1]);
    assert_eq!(names(folder.path()).iter().filter(|name| name.contains("-tmp")).count(), 0);
}

/// What a reader finds when a byte, the length, or a file is not as it was.
#[test]
fn what_is_not_what_was_saved_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    ranks(1, |session| commit(session, &model(1), &path).map(drop).unwrap());
    let manifest_file = manifest_path(&path);
    let manifest = Manifest::read(&manifest_file).unwrap();
    let data = manifest.data_path();
    let whole = fs::read(&data).unwrap();
    let verify = || problem(verify_checkpoint(&manifest_file).unwrap_err());

    // Each byte of the data belongs to a tensor, which is named.
    let header = 8 + usize::try_from(u64::from_le_bytes(whole[..8].try_into().unwrap())).unwrap();
    let table: serde_json::Value = serde_json::from_slice(&whole[8..header]).unwrap();
    for at in header..whole.len() {
        let file = fs::File::options().write(true).open(&data).unwrap();
        file.write_all_at(&[whole[at] ^ 0x10], at as u64).unwrap();
        let expected = table
            .as_object()
            .unwrap()
            .iter()
            .find(|(_, info)| {
                let offset = |index: usize| usize::try_from(info["data_offsets"][index].as_u64().unwrap()).unwrap();
                (offset(0)..offset(1)).contains(&(at - header))
            })
            .map(|(name, _)| name.clone())
            .unwrap();
        match verify() {
            CheckpointProblem::Differs { tensor, others: 0, .. } => assert_eq!(tensor, expected),
            other => panic!("{other}"),
        }
        file.write_all_at(&whole[at..=at], at as u64).unwrap();
    }
    verify_checkpoint(&manifest_file).unwrap();

    for length in 0..whole.len() {
        fs::write(&data, &whole[..length]).unwrap();
        let problem = verify();
        if length < header {
            assert!(matches!(problem, CheckpointProblem::Malformed { .. }), "{problem}");
        } else {
            assert!(matches!(problem, CheckpointProblem::CutOff { .. }), "{problem}");
        }
    }
    fs::write(&data, [whole.as_slice(), b"x"].concat()).unwrap();
    assert!(matches!(verify(), CheckpointProblem::Malformed { .. }));
    fs::remove_file(&data).unwrap();
    assert!(matches!(verify(), CheckpointProblem::Io { file, .. } if file == data));

    // Another checkpoint's data under this name: fewer tensors, more, and others.
    let write = |tensors: &[(&str, Tensor)]| Tensor::write_safetensors(tensors, &data).unwrap();
    let all = || -> Vec<(&str, Tensor)> {
        manifest
            .tensors
            .iter()
            .zip(Parameters::all(&model(1)).unwrap().iter())
            .map(|(saved, (_, tensor))| (saved.name.as_str(), tensor.shallow_clone()))
            .collect()
    };
    write(&all()[1..]);
    assert_eq!(verify(), CheckpointProblem::Missing { tensor: "layer.p0".into() });
    let mut more = all();
    more.push(("zzz", Tensor::from(1.0)));
    write(&more);
    assert_eq!(verify(), CheckpointProblem::Unexpected { tensor: "zzz".into() });
    let mut reshaped = all();
    reshaped[0].1 = reshaped[0].1.reshape([3, 5]);
    write(&reshaped);
    assert!(matches!(verify(), CheckpointProblem::Differs { tensor, .. } if tensor == "layer.p0"));
    write(&all());
    verify_checkpoint(&manifest_file).unwrap();
}

#[test]
fn a_manifest_that_is_not_usable_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    ranks(1, |session| commit(session, &model(1), &path).map(drop).unwrap());
    let manifest_file = manifest_path(&path);
    let whole = fs::read_to_string(&manifest_file).unwrap();
    let digest = &whole[whole.rfind("sha256\": \"").unwrap() + 10..][..64];
    let name = Manifest::read(&manifest_file).unwrap().data;
    for (spoiled, expected) in [
        (whole[..whole.len() / 2].to_string(), "EOF"),
        ("null".into(), "invalid type"),
        (whole.replace("checkpoint 1", "checkpoint 2"), "\"sft-sync checkpoint 2\""),
        (whole.replace(digest, &"0".repeat(64)), "root digest does not follow"),
        (whole.replace(digest, "0"), "is not a SHA-256 digest"),
        (whole.replace("layer.p1", "layer.p4"), "root digest does not follow"),
        (whole.replace(&name, &format!("../{name}")), "is not the name of a file"),
        (whole.replace(&name, ".."), "is not the name of a file"),
    ] {
        fs::write(&manifest_file, &spoiled).unwrap();
        for error in [verify_checkpoint(&manifest_file).unwrap_err(), Manifest::read(&manifest_file).unwrap_err()] {
            let text = error.to_string();
            let problem = problem(error);
            assert!(
                matches!(&problem, CheckpointProblem::Manifest { message } if message.contains(expected)),
                "{problem}"
            );
            assert!(text.contains("model.safetensors.json"), "{text}");
        }
    }
    // What stands beside a digest has to be true as well.
    fs::write(&manifest_file, whole.replacen("\"float32\"", "\"float64\"", 1)).unwrap();
    let error = problem(verify_checkpoint(&manifest_file).unwrap_err());
    assert!(matches!(error, CheckpointProblem::Differs { ref tensor, .. } if tensor == "layer.p0"), "{error}");
    fs::remove_file(&manifest_file).unwrap();
    assert!(matches!(
        problem(verify_checkpoint(&manifest_file).unwrap_err()),
        CheckpointProblem::Io { file, .. } if file == manifest_file
    ));
}

#[test]
fn readers_see_the_old_one_or_the_new_one_at_any_time() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    ranks(1, |session| commit(session, &model(0), &path).map(drop).unwrap());
    let manifest = manifest_path(&path);
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            ranks(2, |session| {
                for salt in 1..40 {
                    commit(session, &model(salt % 5), &path).unwrap();
                }
            })
        });
        let mut seen = 0;
        while !writer.is_finished() {
            verify_checkpoint(&manifest).unwrap();
            seen += 1;
        }
        assert!(seen > 0);
    });
}

#[test]
fn the_commit_has_a_deadline_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    // Longer than an operation may take.
    ranks_with(
        3,
        |_, builder| builder.operation_timeout(Duration::from_secs(2)),
        |session| {
            let store = model(0);
            let verified = check(session, &store);
            session
                .commit_checkpoint(verified, &path, |file| {
                    thread::sleep(Duration::from_secs(3));
                    store.save(file)
                })
                .unwrap();
        },
    );
    // Longer than the commit may take: the others return by it, and nothing is committed.
    ranks_with(
        2,
        |_, builder| builder.commit_timeout(Duration::from_secs(1)).grace(Duration::from_millis(100)),
        |session| {
            let store = model(1);
            let verified = check(session, &store);
            let start = Instant::now();
            let error = session
                .commit_checkpoint(verified, &path, |file| {
                    thread::sleep(Duration::from_secs(3));
                    store.save(file)
                })
                .unwrap_err();
            assert!(error.is_interrupted(), "{error}");
            if session.rank() == 1 {
                assert!(start.elapsed() < Duration::from_millis(2500), "took {:?}", start.elapsed());
                assert!(error.to_string().contains("while rank 0 wrote the file"), "{error}");
            }
        },
    );
    assert_is(&verify_checkpoint(manifest_path(&path)).unwrap(), 0);
    assert_eq!(names(folder.path()).len(), 2, "{:?}", names(folder.path()));
}

#[test]
fn an_injected_failure_leaves_one_of_the_two() {
    for (point, salt) in [
        (Point::CommitWritten, 0),
        (Point::CommitVerified, 0),
        (Point::CommitDataRenamed, 0),
        (Point::CommitManifestRenamed, 1),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        ranks(1, |session| commit(session, &model(0), &path).map(drop).unwrap());
        ranks_with(
            2,
            |_, builder| {
                builder.grace(Duration::from_millis(100)).fault_hook(Arc::new(move |reached| reached != point))
            },
            |session| assert!(commit(session, &model(1), &path).unwrap_err().is_interrupted()),
        );
        assert_is(&verify_checkpoint(manifest_path(&path)).unwrap(), salt);
        assert_eq!(names(folder.path()).len(), 2, "{point:?}: {:?}", names(folder.path()));
    }
}

// ---- ranks that are processes --------------------------------------------------------------------------------------

const ROLE: &str = "SFT_SYNC_COMMIT_ROLE";
const FOLDER: &str = "SFT_SYNC_COMMIT_FOLDER";
const RANK: &str = "SFT_SYNC_COMMIT_RANK";

/// This program again, as one rank.
fn process(role: &str, folder: &Path, rank: usize) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .args(["--exact", "rank_process", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .env(FOLDER, folder)
        .env(RANK, rank.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    command
}

/// Not a test by itself: what the processes of other tests do.
#[test]
fn rank_process() {
    let Ok(role) = env::var(ROLE) else { return };
    let folder = PathBuf::from(env::var(FOLDER).unwrap());
    let rank: usize = env::var(RANK).unwrap().parse().unwrap();
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).unwrap();
    match role.as_str() {
        "relative" => {
            ranks(2, |session| commit(session, &model(0), Path::new("model.safetensors")).map(drop).unwrap());
            ranks(2, |session| commit(session, &model(1), Path::new("model.safetensors")).map(drop).unwrap());
        }
        "full" => full_disk(&folder),
        point => killed_rank(&folder, rank, point),
    }
}

/// Rank 0 is killed at a point of the second commit.
fn killed_rank(folder: &Path, rank: usize, point: &str) {
    let path = folder.join("model.safetensors");
    let commits = Arc::new(Mutex::new(0));
    let (point, seen) = (point.to_string(), Arc::clone(&commits));
    let mut session = SyncSession::builder()
        .rendezvous(Rendezvous::File(folder.join("store")))
        .rank(rank)
        .world_size(2)
        .connect_timeout(Duration::from_secs(60))
        .grace(Duration::from_millis(100))
        .fault_hook(Arc::new({
            let point = point.clone();
            move |reached| {
                if rank == 0 && *seen.lock().unwrap() == 1 && format!("{reached:?}") == point {
                    die();
                }
                true
            }
        }))
        .build()
        .unwrap();
    commit(&mut session, &model(0), &path).unwrap();
    let store = model(1);
    let verified = check(&mut session, &store);
    *commits.lock().unwrap() = 1;
    let start = Instant::now();
    let outcome = session.commit_checkpoint(verified, &path, |file| {
        if point == "writer" {
            store.save(file).unwrap();
            let file = fs::File::options().write(true).open(file).unwrap();
            file.set_len(file.metadata().unwrap().len() / 2).unwrap();
            die();
        }
        store.save(file)
    });
    // Only rank 1 comes here. Where rank 0 was about to return, it had told this rank already.
    match outcome {
        Ok(_) => assert_eq!(point, "CallLeaving"),
        Err(error) => assert!(error.is_interrupted(), "{error}"),
    }
    assert!(start.elapsed() < Duration::from_secs(20), "took {:?}", start.elapsed());
}

fn die() {
    kill(Pid::this(), Signal::SIGKILL).unwrap();
    thread::sleep(Duration::from_secs(60));
}

#[test]
fn a_killed_rank_0_leaves_one_of_the_two() {
    for (point, salt) in [
        ("writer", 0),
        ("CommitWritten", 0),
        ("CommitVerified", 0),
        ("CommitDataRenamed", 0),
        ("CommitManifestRenamed", 1),
        ("CallLeaving", 1),
        ("ExchangePosted", 0),
        ("ExchangeSent", 0),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let mut children: Vec<_> =
            (0..2).map(|rank| process(point, folder.path(), rank).process_group(0).spawn().unwrap()).collect();
        let statuses: Vec<_> = children.iter_mut().map(|child| child.wait().unwrap()).collect();
        assert_eq!(statuses[0].signal(), Some(Signal::SIGKILL as i32), "{point}");
        assert!(statuses[1].success(), "{point}: {:?}", statuses[1]);

        let manifest = verify_checkpoint(manifest_path(&path)).unwrap();
        assert_is(&manifest, salt);
        // What it left behind is in nobody's way.
        ranks(2, |session| commit(session, &model(2), &path).map(drop).unwrap());
        assert_is(&verify_checkpoint(manifest_path(&path)).unwrap(), 2);
    }
}

/// A disk with these mount options, for the program that is run in it; `None` if there cannot be one here.
fn on_a_small_disk(options: &str) -> Option<std::process::ExitStatus> {
    let folder = tempfile::tempdir().unwrap();
    let program = env::current_exe().unwrap();
    let status = Command::new("unshare")
        .args(["--mount", "--map-root-user", "sh", "-c"])
        .arg("mount -t tmpfs -o \"$1\" tmpfs \"$2\" || exit 77; shift 2; exec \"$@\"")
        .args(["sh", options])
        .arg(folder.path())
        .arg(program)
        .args(["--exact", "rank_process", "--nocapture", "--test-threads=1"])
        .env(ROLE, "full")
        .env(FOLDER, folder.path())
        .env(RANK, "0")
        .stdout(Stdio::null())
        .status();
    match status {
        // `unshare` itself fails with 1, as a failed test does not (101).
        Ok(status) if !matches!(status.code(), Some(1 | 77)) => Some(status),
        _ => {
            println!("skipped: no file system can be mounted here");
            None
        }
    }
}

/// What no longer fits is refused.
fn full_disk(folder: &Path) {
    let path = folder.join("model.safetensors");
    let large = |salt: usize| {
        let store = model(salt);
        let _large = store.root().zeros_no_train("large", &[150, 256]);
        store
    };
    ranks(2, |session| {
        commit(session, &model(0), &path).unwrap();
        let refusal = refusal(commit(session, &large(1), &path).unwrap_err());
        let text = refusal.to_string();
        assert!(text.contains("No space left"), "{text}");
        assert!(session.all_agree(0, true).unwrap());
    });
    assert_is(&verify_checkpoint(manifest_path(&path)).unwrap(), 0);
    assert_eq!(names(folder).len(), 2, "{:?}", names(folder));
}

#[test]
fn a_full_disk_leaves_the_checkpoint_before() {
    // No room for the data; room for the data and not for one more file, the manifest.
    for options in ["size=128k", "nr_inodes=4"] {
        if let Some(status) = on_a_small_disk(options) {
            assert!(status.success(), "{options}: {status}");
        }
    }
}
