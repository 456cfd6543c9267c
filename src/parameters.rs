//! [`Parameters`]: the tensors that take part, named, in name order, aliases resolved, and the schema that all ranks
//! must share (invariants I12 and I13).

#![forbid(unsafe_code)]

use std::collections::HashMap;

use itertools::Itertools;
use tch::Tensor;
use tch::nn::VarStore;

use crate::collective::c10d::{self, TensorFacts};
use crate::error::{Result, TensorError, TensorProblem};
use crate::tensor::{DType, DeviceName, inspect};

/// Named tensors in name order.
///
/// Holds handles, not copies: what is done to a parameter is seen through the model's own handle and the other way
/// round, also after [`VarStore::load`] has swapped its storage. A tensor that is reachable under two names (tied
/// weights) is one parameter with an alias, and is reduced once.
///
/// Nothing here is collective. Ranks whose lists differ are told so by the first operation on them.
#[derive(Debug)]
pub struct Parameters {
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    name: String,
    tensor: Tensor,
    /// Index of the first entry, in name order, that is the same tensor.
    alias_of: Option<usize>,
}

impl Parameters {
    /// The variables of the store that require a gradient.
    ///
    /// # Errors
    ///
    /// [`SyncError::Tensor`](crate::SyncError::Tensor) if libtorch cannot read a variable.
    pub fn trainable(store: &VarStore) -> Result<Self> {
        Self::from_named(store.variables().into_iter().filter(|(_, tensor)| tensor.requires_grad()))
    }

    /// All variables of the store: parameters, frozen ones, and buffers such as running means.
    ///
    /// # Errors
    ///
    /// As [`Parameters::trainable`].
    pub fn all(store: &VarStore) -> Result<Self> {
        Self::from_named(store.variables())
    }

    /// Any named tensors, in any order.
    ///
    /// # Errors
    ///
    /// [`SyncError::Tensor`](crate::SyncError::Tensor) if a name occurs twice.
    pub fn from_named<S: Into<String>>(tensors: impl IntoIterator<Item = (S, Tensor)>) -> Result<Self> {
        let mut named: Vec<(String, Tensor)> =
            tensors.into_iter().map(|(name, tensor)| (name.into(), tensor)).collect();
        named.sort_by(|(a, _), (b, _)| a.cmp(b));
        if let Some(((name, _), _)) = named.iter().tuple_windows().find(|((a, _), (b, _))| a == b) {
            return Err(TensorError::new(name, TensorProblem::DuplicateName).into());
        }
        let mut first: HashMap<usize, usize> = HashMap::new();
        let mut entries = Vec::with_capacity(named.len());
        for (index, (name, tensor)) in named.into_iter().enumerate() {
            let facts = inspect(&tensor).map_err(|problem| TensorError::new(&name, problem))?;
            // The handle held here keeps the tensor alive, so no other tensor can come to have its identity.
            let alias_of = if facts.defined {
                let target = *first.entry(facts.identity).or_insert(index);
                (target != index).then_some(target)
            } else {
                None
            };
            entries.push(Entry { name, tensor, alias_of });
        }
        Ok(Self { entries })
    }

    /// The number of names, aliases included.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The names and tensors in name order, aliases included.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.entries.iter().map(|entry| (entry.name.as_str(), &entry.tensor))
    }

    /// All of them, for [`assert_rank_equal`](crate::SyncSession::assert_rank_equal).
    pub fn values(&self) -> impl Iterator<Item = NamedTensor> {
        self.iter().map(NamedTensor::from)
    }

    /// Those that require no gradient: the frozen base of a fine-tune.
    pub fn frozen(&self) -> impl Iterator<Item = NamedTensor> {
        self.iter().filter(|(_, tensor)| !tensor.requires_grad()).map(NamedTensor::from)
    }

    /// Each tensor once, under its first name, in name order.
    pub(crate) fn unique(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.entries.iter().filter(|entry| entry.alias_of.is_none()).map(|entry| (entry.name.as_str(), &entry.tensor))
    }

    /// Makes all gradients undefined, so that an optimizer step changes nothing.
    pub(crate) fn withdraw_gradients(&self) {
        for (name, tensor) in self.unique() {
            if tensor.defined()
                && let Err(error) = c10d::clear_grad(tensor)
            {
                tracing::error!(tensor = name, %error, "a gradient could not be withdrawn");
            }
        }
    }
}

/// A named tensor, or the absence of one, for a consistency check.
#[derive(Debug)]
pub struct NamedTensor {
    pub(crate) name: String,
    pub(crate) tensor: Option<Tensor>,
}

impl<S: Into<String>> From<(S, Tensor)> for NamedTensor {
    fn from((name, tensor): (S, Tensor)) -> Self {
        Self { name: name.into(), tensor: Some(tensor) }
    }
}

impl<S: Into<String>> From<(S, &Tensor)> for NamedTensor {
    fn from((name, tensor): (S, &Tensor)) -> Self {
        Self { name: name.into(), tensor: Some(tensor.shallow_clone()) }
    }
}

impl<S: Into<String>> From<(S, Option<Tensor>)> for NamedTensor {
    fn from((name, tensor): (S, Option<Tensor>)) -> Self {
        Self { name: name.into(), tensor }
    }
}

impl NamedTensor {
    /// A single number or truth value, such as a step or a learning rate, as a tensor of no dimension: `int64`, `float64`
    /// or `bool`.
    ///
    /// ```
    /// use sft_sync::NamedTensor;
    ///
    /// let state = [NamedTensor::scalar("step", 12_u64), NamedTensor::scalar("learning_rate", 2e-4)];
    /// # drop(state);
    /// ```
    pub fn scalar(name: impl Into<String>, value: impl Scalar) -> Self {
        Self { name: name.into(), tensor: Some(value.tensor()) }
    }

    /// Bytes, such as the state of a random number generator, as a `uint8` tensor of one dimension.
    pub fn bytes(name: impl Into<String>, bytes: &[u8]) -> Self {
        Self { name: name.into(), tensor: Some(Tensor::from_slice(bytes)) }
    }
}

mod sealed {
    pub trait Sealed {}
}

/// What [`NamedTensor::scalar`] takes: `u64`, `usize`, `i64`, `i32`, `f64`, `f32` and `bool`.
///
/// Integers become `int64`: unsigned ones above its range keep their bits. Floats become `float64`.
pub trait Scalar: sealed::Sealed {
    #[doc(hidden)]
    fn tensor(self) -> Tensor;
}

macro_rules! scalars {
    ($($type:ty => $as:expr),*) => {$(
        impl sealed::Sealed for $type {}
        impl Scalar for $type {
            fn tensor(self) -> Tensor {
                Tensor::from($as(self))
            }
        }
    )*};
}

scalars! {
    u64 => bits,
    usize => |value| bits(value as u64),
    i64 => i64::from,
    i32 => i64::from,
    f64 => f64::from,
    f32 => f64::from,
    bool => bool::from
}

fn bits(value: u64) -> i64 {
    i64::from_ne_bytes(value.to_ne_bytes())
}

/// What one pass over the parameters found, on this rank, in this call.
///
/// Kept from call to call: while nothing about the parameters has changed, digest and plan are used again.
#[derive(Debug, Default)]
pub(crate) struct Schema {
    /// One for each unique parameter, in name order.
    pub(crate) members: Vec<SchemaMember>,
    /// Digest over all lines: names, shapes, dtypes, kinds of device, `requires_grad`, aliases.
    pub(crate) digest: [u8; 16],
    lines: Vec<SchemaLine>,
    taken: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SchemaMember {
    pub(crate) shape: Vec<i64>,
    pub(crate) dtype: DType,
    pub(crate) device: DeviceName,
    pub(crate) nbytes: usize,
    pub(crate) requires_grad: bool,
}

/// A name and what must be equal about it, for the report of a difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SchemaLine {
    pub(crate) name: String,
    pub(crate) text: String,
}

impl SchemaLine {
    pub(crate) fn hash(&self) -> u64 {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(self.name.len() as u64).to_le_bytes());
        hasher.update(self.name.as_bytes());
        hasher.update(self.text.as_bytes());
        first_u64(hasher.finalize())
    }
}

/// The first eight bytes of a hash, as a number.
pub(crate) fn first_u64(hash: blake3::Hash) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&hash.as_bytes()[..8]);
    u64::from_le_bytes(bytes)
}

impl Schema {
    pub(crate) fn lines(&self) -> &[SchemaLine] {
        &self.lines
    }

    /// Takes the facts of the unique parameters; `true` if anything differs from the call before.
    pub(crate) fn update(&mut self, parameters: &Parameters, facts: &[TensorFacts]) -> bool {
        if self.taken && self.matches(parameters, facts) {
            return false;
        }
        self.taken = true;
        self.members = parameters
            .unique()
            .zip(facts)
            .map(|((_, tensor), facts)| SchemaMember {
                shape: c10d::sizes(tensor).to_vec(),
                dtype: facts.dtype(),
                device: facts.device(),
                nbytes: facts.nbytes(),
                requires_grad: facts.requires_grad,
            })
            .collect();
        let mut member = self.members.iter();
        self.lines = parameters
            .entries
            .iter()
            .map(|entry| SchemaLine {
                name: entry.name.clone(),
                text: match entry.alias_of {
                    Some(target) => format!("the same tensor as {:?}", parameters.entries[target].name),
                    None => member.next().map(describe).unwrap_or_default(),
                },
            })
            .collect();
        let mut hasher = blake3::Hasher::new();
        for line in &self.lines {
            hasher.update(&line.hash().to_le_bytes());
        }
        self.digest.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        true
    }

    fn matches(&self, parameters: &Parameters, facts: &[TensorFacts]) -> bool {
        let mut member = self.members.iter();
        let mut facts = facts.iter();
        self.lines.len() == parameters.len()
            && parameters.entries.iter().zip(&self.lines).all(|(entry, line)| {
                entry.name == line.name
                    && match entry.alias_of {
                        // An alias line names its target; comparing it again is cheap, since aliases are rare.
                        Some(target) => {
                            line.text == format!("the same tensor as {:?}", parameters.entries[target].name)
                        }
                        None => match (member.next(), facts.next()) {
                            (Some(member), Some(facts)) => {
                                member.dtype == facts.dtype()
                                    && member.device == facts.device()
                                    && member.requires_grad == facts.requires_grad
                                    && member.shape == c10d::sizes(&entry.tensor)
                            }
                            _ => false,
                        },
                    }
            })
            && member.next().is_none()
    }
}

fn describe(member: &SchemaMember) -> String {
    format!(
        "{} {:?} on {}, {}",
        member.dtype,
        member.shape,
        member.device.kind(),
        if member.requires_grad { "trainable" } else { "frozen" }
    )
}
