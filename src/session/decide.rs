//! Deciding together: a yes or no, and sums of single numbers.

use super::{Call, During, Failure, Outcome, SyncSession};
use crate::collective::agreement::NO;
use crate::error::{EngineError, Operation, Result, Stage, SyncError};

mod sealed {
    pub trait Sealed {}
}

/// Numbers that can be summed over ranks: `u64`, `usize`, `i64` and `f64`.
pub trait Summable: sealed::Sealed + Copy {
    #[doc(hidden)]
    const CODE: u64;
    #[doc(hidden)]
    fn to_wire(self) -> [u8; 8];
    #[doc(hidden)]
    fn from_wire(bytes: [u8; 8]) -> Self;
    /// `None` where the sum does not fit.
    #[doc(hidden)]
    fn plus(self, other: Self) -> Option<Self>;
}

macro_rules! summable_integer {
    ($type:ty, $wire:ty, $code:expr) => {
        impl sealed::Sealed for $type {}
        impl Summable for $type {
            const CODE: u64 = $code;
            fn to_wire(self) -> [u8; 8] {
                (self as $wire).to_le_bytes()
            }
            fn from_wire(bytes: [u8; 8]) -> Self {
                <$wire>::from_le_bytes(bytes) as $type
            }
            fn plus(self, other: Self) -> Option<Self> {
                self.checked_add(other)
            }
        }
    };
}

summable_integer!(u64, u64, 1);
summable_integer!(i64, i64, 2);
// The crate supports 64-bit targets only: so does libtorch.
#[allow(clippy::cast_possible_truncation)]
mod pointer_sized {
    use super::{Summable, sealed};
    summable_integer!(usize, u64, 1);
}

impl sealed::Sealed for f64 {}
impl Summable for f64 {
    const CODE: u64 = 3;
    fn to_wire(self) -> [u8; 8] {
        self.to_le_bytes()
    }
    fn from_wire(bytes: [u8; 8]) -> Self {
        Self::from_le_bytes(bytes)
    }
    fn plus(self, other: Self) -> Option<Self> {
        Some(self + other)
    }
}

impl SyncSession {
    /// Whether the answer is yes on every rank. One rank with a non-finite loss makes all of them skip the step, or none
    /// of them. Collective.
    ///
    /// # Errors
    ///
    /// [`SyncError::Desynchronized`] if a rank makes another call, or this one with another `step`;
    /// [`SyncError::Interrupted`] if one is gone; [`SyncError::Poisoned`] after a failure.
    pub fn all_agree(&mut self, step: u64, local_ok: bool) -> Result<bool> {
        self.run(Operation::AllAgree, Some(step), None, |session, call| {
            let frame = session.frame(call).flag(NO, !local_ok);
            Ok(!session.agree(call, frame, None)?.any(NO))
        })
    }

    /// The sum of one number over all ranks: token counts, losses, metrics. Collective.
    ///
    /// Added in the order of ranks, so that every rank gets the same bits, also for `f64`.
    ///
    /// # Errors
    ///
    /// As [`all_agree`](Self::all_agree), also if ranks bring different types; [`SyncError::Uncountable`] if an integer
    /// sum does not fit.
    pub fn sum<T: Summable>(&mut self, step: u64, local: T) -> Result<T> {
        self.run(Operation::Sum, Some(step), None, |session, call| {
            let frame = session.frame(call).content(T::CODE);
            session.agree(call, frame, None)?;
            session.sum_agreed(call, local)
        })
    }

    /// Collective, after an agreement on the type.
    pub(super) fn sum_agreed<T: Summable>(&mut self, call: &Call, local: T) -> Outcome<T> {
        let gathered = self.communicator.gather(&local.to_wire(), &call.deadline).during(Stage::Data)?;
        let mut values = gathered.iter().map(|bytes| {
            <[u8; 8]>::try_from(bytes.as_slice())
                .map(T::from_wire)
                .map_err(|_| EngineError::other("a rank sent a number of another size"))
                .during(Stage::Data)
        });
        let first = values.next().unwrap_or(Ok(local))?;
        let mut total = first;
        for value in values {
            total = total.plus(value?).ok_or_else(|| {
                Failure::Verdict(SyncError::Uncountable {
                    at: call.at.clone(),
                    problem: "the sum over ranks does not fit the type".into(),
                })
            })?;
        }
        Ok(total)
    }
}
