//! What an undisturbed run comes to, bit by bit: the same loop on ranks that are threads. And, so that the library is
//! not its own witness, the same training on one replica that sees all ranks' data at once, within rounding.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use sft_sync::{InProcess, Rendezvous, SyncSession};
use tch::{Kind, Tensor};

use crate::model::{self, Model};
use crate::record::{Log, Moment, Record};
use crate::scenario::{Scenario, Shape};
use crate::train::{Trainer, shaped};

/// Digests of all tensors.
#[derive(Debug)]
pub(crate) struct Reference {
    pub(crate) start: String,
    pub(crate) steps: Vec<String>,
    /// What is wrong with the undisturbed run itself.
    pub(crate) problem: Option<String>,
}

type Key = (usize, u64, Shape, BTreeSet<u64>);

/// Undisturbed runs, each made once.
#[derive(Default)]
pub(crate) struct References(Mutex<HashMap<Key, Arc<Reference>>>);

impl References {
    /// The run in which the steps in `without` changed nothing.
    pub(crate) fn get(&self, scenario: &Scenario, without: &BTreeSet<u64>) -> Arc<Reference> {
        let key = (scenario.world, scenario.steps, scenario.shape, without.clone());
        let mut runs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(runs.entry(key).or_insert_with(|| Arc::new(make(scenario, without))))
    }
}

fn make(scenario: &Scenario, without: &BTreeSet<u64>) -> Reference {
    let place = InProcess::new().expect("an in-process store");
    let (records, tensors): (Vec<Record>, Vec<(String, Tensor)>) = thread::scope(|scope| {
        let ranks: Vec<_> = (0..scenario.world)
            .map(|rank| {
                let builder = SyncSession::builder()
                    .rendezvous(Rendezvous::InProcess(place.clone()))
                    .rank(rank)
                    .world_size(scenario.world)
                    .connect_timeout(Duration::from_secs(60))
                    .operation_timeout(Duration::from_secs(60));
                scope.spawn(move || {
                    let log = Log::in_memory();
                    let mut trainer = Trainer::undisturbed(scenario, rank, log.clone(), without.clone());
                    trainer.run(shaped(builder, scenario.shape));
                    (log.in_memory_records(), trainer.model().trainable())
                })
            })
            .collect();
        let mut results: Vec<_> = ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect();
        results.swap_remove(0)
    });
    let held = |wanted: Moment| {
        records.iter().find_map(|record| match record {
            Record::Held { moment, digest } if *moment == wanted => Some(digest.clone()),
            _ => None,
        })
    };
    let steps: Option<Vec<String>> = (0..scenario.steps).map(|step| held(Moment::Step(step))).collect();
    let problem = match &steps {
        None => Some(format!("the undisturbed run did not come to its end: {records:?}")),
        Some(_) => differs_from_one_replica(scenario, without, &tensors),
    };
    Reference { start: held(Moment::Start).unwrap_or_default(), steps: steps.unwrap_or_default(), problem }
}

fn differs_from_one_replica(
    scenario: &Scenario,
    without: &BTreeSet<u64>,
    tensors: &[(String, Tensor)],
) -> Option<String> {
    let world = scenario.world;
    let mut model = Model::new(0, scenario.shape);
    for step in (0..scenario.steps).filter(|step| !without.contains(step)) {
        let total: u64 = (0..world).map(|rank| model::tokens(rank, step)).sum();
        let loss: Tensor = (0..world).map(|rank| model.loss_sum(rank, world, step, false)).sum();
        model.optimizer.zero_grad();
        #[allow(clippy::cast_precision_loss)] // A small number.
        (loss / total as f64).backward();
        model.optimizer.step();
    }
    model.trainable().iter().zip(tensors).find_map(|((name, one), (_, many))| {
        let far = (one - many).abs().max().to_kind(Kind::Double).double_value(&[]);
        // Written so that it also catches a NaN.
        let close = far < 2e-5;
        (!close).then(|| format!("{name} is {far:e} off what one replica with all the data learns"))
    })
}
