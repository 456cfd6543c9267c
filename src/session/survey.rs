//! One local pass over the parameters, before anything is agreed: what is there, and whether it can take part.

use itertools::Itertools;
use tch::Tensor;

use super::SyncSession;
use crate::collective::agreement::Mask;
use crate::collective::c10d::{self, TensorFacts};
use crate::error::{TensorError, TensorProblem};
use crate::parameters::Parameters;
use crate::tensor::inspect;

/// What one pass has found.
pub(super) struct Survey {
    /// Whether each unique parameter has a gradient here.
    pub(super) used: Mask,
    pub(super) count: usize,
    /// The first thing, in name order, that keeps this rank from taking part.
    pub(super) refusal: Option<TensorError>,
    /// Something about the parameters differs from the call before.
    pub(super) changed: bool,
}

/// What an operation needs of the parameters.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    /// Gradients that can be summed.
    Gradients,
    /// Parameters that can be overwritten.
    Writable,
}

impl SyncSession {
    /// Local. Never fails: what is wrong is brought to the agreement.
    pub(super) fn survey(&mut self, parameters: &Parameters, need: Need) -> Survey {
        let mut facts = Vec::with_capacity(parameters.len());
        let mut gradients = Vec::with_capacity(parameters.len());
        let mut refusal: Option<TensorError> = None;
        for (name, tensor) in parameters.unique() {
            let (own, gradient, checked) = look(tensor, need);
            if let Err(problem) = checked {
                refusal.get_or_insert_with(|| TensorError::new(name, problem));
            }
            facts.push(own);
            gradients.push(gradient);
        }
        if refusal.is_none() {
            refusal = overlap(parameters, &facts, |other| TensorProblem::Overlap { other })
                .or_else(|| overlap(parameters, &gradients, |other| TensorProblem::GradientOverlap { other }));
        }
        let changed = self.schema.update(parameters, &facts);
        Survey {
            used: Mask::new(gradients.iter().map(|gradient| gradient.defined)),
            count: facts.len(),
            refusal,
            changed,
        }
    }
}

/// The facts of a parameter and of its gradient, as far as they can be had, and whether the parameter can take part.
fn look(tensor: &Tensor, need: Need) -> (TensorFacts, TensorFacts, Result<(), TensorProblem>) {
    let nothing = TensorFacts::default();
    let own = match inspect(tensor) {
        Ok(own) => own,
        Err(problem) => return (nothing.clone(), nothing, Err(problem)),
    };
    let gradient = match need {
        Need::Writable => nothing,
        Need::Gradients => match c10d::inspect_grad(tensor) {
            Ok(gradient) => gradient,
            Err(error) => return (own, nothing, Err(error.into())),
        },
    };
    let checked = check(tensor, &own, &gradient, need);
    (own, gradient, checked)
}

fn check(tensor: &Tensor, own: &TensorFacts, gradient: &TensorFacts, need: Need) -> Result<(), TensorProblem> {
    own.check_plain()?;
    check_device(own)?;
    match need {
        Need::Writable if own.overlapping => Err(TensorProblem::Expanded),
        Need::Gradients if gradient.defined => check_gradient(tensor, own, gradient),
        Need::Writable | Need::Gradients => Ok(()),
    }
}

fn check_device(facts: &TensorFacts) -> Result<(), TensorProblem> {
    if facts.device().is_cpu() { Ok(()) } else { Err(TensorProblem::Device { device: facts.device().to_string() }) }
}

fn check_gradient(parameter: &Tensor, own: &TensorFacts, gradient: &TensorFacts) -> Result<(), TensorProblem> {
    if gradient.is_sparse() {
        return Err(TensorProblem::SparseGradient);
    }
    if gradient.check_plain().is_err() {
        let kind = if gradient.quantized {
            "quantized"
        } else if gradient.device().is_meta() {
            "on the meta device"
        } else {
            "of an unusual layout"
        };
        return Err(TensorProblem::StrangeGradient { kind: kind.into() });
    }
    if gradient.device() != own.device() {
        return Err(TensorProblem::GradientDevice {
            parameter: own.device().to_string(),
            gradient: gradient.device().to_string(),
        });
    }
    if gradient.dtype() != own.dtype() {
        return Err(TensorProblem::GradientDtype {
            parameter: own.dtype().to_string(),
            gradient: gradient.dtype().to_string(),
        });
    }
    let gradient_shape = c10d::grad_sizes(parameter)?;
    if gradient_shape != c10d::sizes(parameter) {
        return Err(TensorProblem::GradientShape {
            parameter: c10d::sizes(parameter).to_vec(),
            gradient: gradient_shape,
        });
    }
    if !own.dtype().summable() {
        return Err(TensorProblem::Unsummable { dtype: own.dtype().to_string() });
    }
    Ok(())
}

/// The first pair, by address, whose memory overlaps. Ranges are compared, so that two strided views which interleave
/// without sharing an element are refused as well.
fn overlap(
    parameters: &Parameters,
    facts: &[TensorFacts],
    problem: impl Fn(String) -> TensorProblem,
) -> Option<TensorError> {
    let mut ranges: Vec<(usize, usize, usize)> = facts
        .iter()
        .enumerate()
        .filter(|(_, facts)| facts.end > facts.begin)
        .map(|(index, facts)| (facts.begin, facts.end, index))
        .collect();
    ranges.sort_unstable();
    let (&(_, _, one), &(_, _, other)) =
        ranges.iter().tuple_windows().find(|((_, end, _), (begin, _, _))| begin < end)?;
    let name = |index: usize| parameters.unique().nth(index).map_or_else(String::new, |(name, _)| name.to_string());
    let (first, second) = (one.min(other), one.max(other));
    Some(TensorError::new(name(second), problem(name(first))))
}
