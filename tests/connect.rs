//! Coming together, or not: clear errors, bounded by the deadline.
#![allow(missing_docs)]

mod common;

use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use common::build_ranks;
use sft_sync::{ConnectProblem, ConnectStage, InProcess, Rendezvous, Result, SessionBuilder, SyncError, SyncSession};
use tch::Kind;

/// Of a store on this machine: a port that was free a moment ago.
fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

fn tcp(port: u16) -> Rendezvous {
    Rendezvous::Tcp { host: "127.0.0.1".into(), port, hosted_elsewhere: false }
}

fn builder(rendezvous: Rendezvous, rank: usize, world: usize) -> SessionBuilder {
    SyncSession::builder()
        .rendezvous(rendezvous)
        .rank(rank)
        .world_size(world)
        .connect_timeout(Duration::from_secs(30))
        .grace(Duration::from_millis(100))
}

fn together(rendezvous: &Rendezvous, world: usize) {
    thread::scope(|scope| {
        for rank in 0..world {
            scope.spawn(move || {
                let mut session = builder(rendezvous.clone(), rank, world).build().unwrap();
                assert_eq!((session.rank(), session.world_size()), (rank, world));
                assert_eq!(session.sum(0, 1_u64).unwrap(), world as u64);
                session.shutdown().unwrap();
            });
        }
    });
}

#[test]
fn ranks_meet_at_every_kind_of_store() {
    let folder = tempfile::tempdir().unwrap();
    for world in [1, 2, 5] {
        together(&Rendezvous::InProcess(InProcess::new().unwrap()), world);
        together(&Rendezvous::File(folder.path().join(format!("store{world}"))), world);
        together(&tcp(free_port()), world);
    }
}

#[test]
fn sixty_four_ranks_connect_and_agree() {
    common::ranks(64, |session| assert_eq!(session.sum(0, session.rank()).unwrap(), 64 * 63 / 2));
}

#[track_caller]
fn connect_error(result: Result<SyncSession>, within: Duration) -> sft_sync::ConnectError {
    let SyncError::Connect(error) = result.unwrap_err() else { panic!("not a connect error") };
    assert!(error.waited < within, "{error}");
    *error
}

#[test]
fn peers_that_never_come_are_named() {
    let limit = Duration::from_secs(1);
    for rendezvous in [tcp(free_port()), Rendezvous::InProcess(InProcess::new().unwrap())] {
        let start = Instant::now();
        let error = connect_error(builder(rendezvous, 0, 3).connect_timeout(limit).build(), limit * 3);
        assert!(start.elapsed() < limit + Duration::from_secs(2));
        assert_eq!(error.stage, ConnectStage::Rendezvous);
        assert!(matches!(&error.problem, ConnectProblem::Missing { missing } if missing == &[1, 2]), "{error}");
        assert!(error.to_string().contains("these ranks did not come: ranks 1, 2"), "{error}");
    }
}

#[test]
fn a_port_that_nobody_listens_on_is_named() {
    let port = free_port();
    let limit = Duration::from_secs(1);
    let start = Instant::now();
    let error = connect_error(builder(tcp(port), 1, 2).connect_timeout(limit).build(), limit * 3);
    assert!(start.elapsed() < limit + Duration::from_secs(2), "took {:?}", start.elapsed());
    assert_eq!(error.stage, ConnectStage::Store);
    assert!(error.to_string().contains(&format!("127.0.0.1:{port}")), "{error}");
}

#[test]
fn a_port_that_somebody_else_holds_is_named() {
    let holder = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = holder.local_addr().unwrap().port();
    let error = connect_error(builder(tcp(port), 0, 1).build(), Duration::from_secs(20));
    assert_eq!(error.stage, ConnectStage::Store);
    assert!(error.to_string().contains(&format!("127.0.0.1:{port}")), "{error}");
}

#[test]
fn a_server_that_is_no_store_is_given_up_by_the_deadline() {
    // Accepts connections and says nothing, as a stopped store host does.
    let silent = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = silent.local_addr().unwrap().port();
    let limit = Duration::from_secs(1);
    let start = Instant::now();
    let error = connect_error(builder(tcp(port), 1, 2).connect_timeout(limit).build(), limit * 3);
    assert!(start.elapsed() < limit + Duration::from_secs(2), "took {:?}", start.elapsed());
    assert!(matches!(error.stage, ConnectStage::Store | ConnectStage::Rendezvous), "{error}");
}

#[test]
fn of_two_processes_with_one_rank_one_is_refused() {
    let place = InProcess::new().unwrap();
    thread::scope(|scope| {
        let twins: Vec<_> = (0..2)
            .map(|_| {
                let place = Rendezvous::InProcess(place.clone());
                scope.spawn(move || builder(place, 0, 2).connect_timeout(Duration::from_secs(20)).build())
            })
            .collect();
        // The other rank comes only when one of the twins has been refused: then the rest still connect.
        while !twins.iter().any(thread::ScopedJoinHandle::is_finished) {
            thread::yield_now();
        }
        let other = builder(Rendezvous::InProcess(place.clone()), 1, 2).build();
        let results: Vec<_> = twins.into_iter().map(|twin| twin.join().unwrap()).collect();
        let refused: Vec<_> = results.iter().filter_map(|result| result.as_ref().err()).collect();
        assert_eq!(refused.len(), 1);
        assert!(
            matches!(refused[0], SyncError::Connect(error) if matches!(error.problem, ConnectProblem::DuplicateRank { rank: 0 })),
            "{}",
            refused[0]
        );
        drop((results, other.unwrap()));
    });
}

#[test]
fn different_world_sizes_are_told_to_all() {
    let errors =
        build_ranks(2, |rank, builder| builder.world_size(rank + 2), |session| session.unwrap_err().to_string());
    assert!(errors.iter().all(|error| error.contains("was started for")), "{errors:?}");
}

#[test]
fn settings_that_make_no_sense_are_named() {
    let place = || Rendezvous::InProcess(InProcess::new().unwrap());
    let cases = [
        ("rank", builder(place(), 2, 2)),
        ("world_size", builder(place(), 0, 0)),
        ("bucket_bytes", builder(place(), 0, 1).bucket_bytes(0)),
        ("operation_timeout", builder(place(), 0, 1).operation_timeout(Duration::ZERO)),
        ("connect_timeout", builder(place(), 0, 1).connect_timeout(Duration::ZERO)),
        ("reduction_dtype", builder(place(), 0, 1).reduction_dtype(Kind::Half)),
        ("rendezvous", SyncSession::builder().rank(0).world_size(1)),
        ("rank", SyncSession::builder().rendezvous(place()).world_size(1)),
        ("world_size", SyncSession::builder().rendezvous(place()).rank(0)),
    ];
    for (name, builder) in cases {
        let error = builder.build().unwrap_err();
        assert!(matches!(&error, SyncError::Configuration { setting, .. } if setting == name), "{error}");
    }
}

#[test]
fn an_interface_that_does_not_exist_is_an_error() {
    let error = builder(Rendezvous::InProcess(InProcess::new().unwrap()), 0, 1).interface("nosuch0").build();
    let error = connect_error(error, Duration::from_secs(20));
    assert_eq!(error.stage, ConnectStage::Mesh);
    assert!(error.to_string().contains("nosuch0"), "{error}");
}
