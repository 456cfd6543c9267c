//! A small model and its data: what a rank learns from depends on rank and step, never on chance.

use std::collections::BTreeMap;

use sft_sync::{NamedTensor, Parameters, tensor_digest};
use tch::nn::{self, Init, OptimizerConfig};
use tch::{Device, Kind, Tensor};

use crate::scenario::Shape;

const WORDS: i64 = 19;
const WIDTH: i64 = 8;
const HIDDEN: i64 = 48;
const CLASSES: i64 = 5;
const WIDE: i64 = 1 << 20;

pub(crate) struct Model {
    pub(crate) store: nn::VarStore,
    pub(crate) optimizer: nn::Optimizer,
    embedding: Tensor,
    hidden: (Tensor, Tensor),
    output: (Tensor, Tensor),
    /// Learns on one rank a step only: everywhere else its gradient is absent.
    rare: Tensor,
    /// A large parameter, if there is one, and what it is multiplied with.
    wide: Option<(Tensor, Tensor)>,
    /// Frozen.
    scale: Tensor,
}

/// The parameter whose gradient turns sparse.
pub(crate) const EMBEDDING: &str = "embedding.weight";
/// Two parameters of different shapes.
pub(crate) const HIDDEN_WEIGHT: &str = "hidden.weight";
pub(crate) const OUTPUT_WEIGHT: &str = "output.weight";
pub(crate) const FROZEN: &str = "scale";

impl Model {
    /// Ranks begin with different weights: the broadcast has something to do.
    pub(crate) fn new(rank: usize, shape: Shape) -> Self {
        let store = nn::VarStore::new(Device::Cpu);
        let root = store.root();
        let variable = |path: nn::Path<'_>, name: &str, shape: &[i64]| path.var(name, shape, Init::Const(0.0));
        let embedding = variable(&root / "embedding", "weight", &[WORDS, WIDTH]);
        let hidden =
            (variable(&root / "hidden", "weight", &[HIDDEN, WIDTH]), variable(&root / "hidden", "bias", &[HIDDEN]));
        let output =
            (variable(&root / "output", "weight", &[CLASSES, HIDDEN]), variable(&root / "output", "bias", &[CLASSES]));
        let rare = variable(root.clone(), "rare", &[7]);
        // No rank ever uses it.
        let _ = variable(root.clone(), "unused", &[3]);
        let wide = shape.wide.then(|| (variable(root.clone(), "wide", &[WIDE]), pattern(0, 1, &[WIDE], 0.1)));
        let scale = root.zeros_no_train(FROZEN, &[WIDTH]);
        tch::no_grad(|| {
            for (salt, (name, mut tensor)) in sorted(&store).into_iter().enumerate() {
                let whose = if name == FROZEN { 0 } else { rank };
                let values = pattern(whose, salt, &tensor.size(), 0.02);
                tensor.copy_(&if name == FROZEN { values + 1.0 } else { values });
            }
        });
        // A large epsilon keeps the update smooth where a gradient is all but zero, so that another order of summation
        // cannot turn an update round.
        let optimizer = nn::AdamW { eps: 1e-2, ..nn::AdamW::default() }.build(&store, 1e-2).expect("AdamW");
        Self { store, optimizer, embedding, hidden, output, rare, wide, scale }
    }

    /// The loss of all tokens of a rank's batch, summed.
    pub(crate) fn loss_sum(&self, rank: usize, world: usize, step: u64, sparse: bool) -> Tensor {
        let count = i64::try_from(tokens(rank, step)).expect("a small number");
        let offset = i64::try_from(rank).expect("a rank") * 3 + i64::try_from(step).expect("a step") * 5;
        let words: Vec<i64> = (0..count).map(|index| (index * 7 + offset) % WORDS).collect();
        let embedded = Tensor::embedding(&self.embedding, &Tensor::from_slice(&words), -1, false, sparse);
        let inner = (embedded * &self.scale).linear(&self.hidden.0, Some(&self.hidden.1)).tanh();
        let logits = inner.linear(&self.output.0, Some(&self.output.1));
        let target = pattern(rank, usize::try_from(step).expect("a step"), &[count, CLASSES], 0.1);
        let mut loss = (logits - target).square().sum(Kind::Float);
        if let Some((wide, data)) = &self.wide {
            loss += wide.dot(data) * (f64::from(u32::try_from(rank).expect("a rank")) + 1.0);
        }
        if usize::try_from(step).expect("a step") % world == rank {
            loss + (&self.rare * pattern(rank, 3, &[7], 0.1)).sum(Kind::Float)
        } else {
            loss
        }
    }

    pub(crate) fn parameters(&self) -> Parameters {
        Parameters::trainable(&self.store).expect("plain variables")
    }

    /// The variables that a gradient is asked for, in name order.
    pub(crate) fn trainable(&self) -> Vec<(String, Tensor)> {
        sorted(&self.store).into_iter().filter(|(_, tensor)| tensor.requires_grad()).collect()
    }

    /// Everything that replicas must share.
    pub(crate) fn everything(&self) -> Vec<NamedTensor> {
        sorted(&self.store).into_iter().map(NamedTensor::from).collect()
    }

    /// One digest over all variables.
    pub(crate) fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for (name, tensor) in sorted(&self.store) {
            hasher.update(name.as_bytes());
            hasher.update(tensor_digest(&tensor).expect("a plain tensor").as_bytes());
        }
        hasher.finalize().to_hex()[..16].to_string()
    }

    pub(crate) fn variable(&self, name: &str) -> Tensor {
        self.store.variables().remove(name).expect("a variable of the model")
    }
}

fn sorted(store: &nn::VarStore) -> BTreeMap<String, Tensor> {
    store.variables().into_iter().collect()
}

/// How many tokens a rank has in a step.
pub(crate) fn tokens(rank: usize, step: u64) -> u64 {
    5 + (rank as u64 * 3 + step) % 7
}

/// Numbers that depend on rank and index, with a prime period.
fn pattern(rank: usize, salt: usize, shape: &[i64], unit: f64) -> Tensor {
    let count = usize::try_from(shape.iter().product::<i64>()).expect("a small shape");
    let numbers: Vec<f32> = (0..count)
        .map(|index| f32::from(u8::try_from((index * 7 + rank * 3 + salt * 5) % 13).expect("below 13")) - 6.0)
        .collect();
    Tensor::from_slice(&numbers).reshape(shape) * unit
}

/// Flips a bit of a float32 tensor in place, behind autograd's back: of the first element from `element` on that is not
/// zero, since no update absorbs the flip there.
pub(crate) fn flip(tensor: &Tensor, element: u64, bit: u32) {
    tch::no_grad(|| {
        let tensor = tensor.detach();
        let elements = u64::try_from(tensor.numel()).expect("a size");
        let place = |element: u64| {
            let mut rest = i64::try_from(element % elements).expect("an index");
            // A view whatever the strides are.
            tensor.size().iter().rev().fold(tensor.shallow_clone(), |view, size| {
                let index = rest % size;
                rest /= size;
                view.select(-1, index)
            })
        };
        let mut word = (element % elements..)
            .take(tensor.numel())
            .map(place)
            .find(|element| element.double_value(&[]) != 0.0)
            .expect("not all zeros")
            .view_dtype(Kind::Int);
        let flipped = word.bitwise_xor_tensor(&Tensor::from(1_i32.wrapping_shl(bit)));
        word.copy_(&flipped);
    });
}
