//! The fingerprint in torch operations, on the device where the tensor lies: only the sums of blocks come to the CPU.

use tch::{Device, Kind, Tensor};

use super::{BLOCK, Key, WORDS};
use crate::collective::c10d;
use crate::consistency::digest::pieces;
use crate::error::EngineError;

/// Bytes that are summed at a time. Beside the staging area, products take twice as many: about 3 x 8 MiB in all,
/// whatever the size of the tensor.
const STAGED: usize = 8 << 20;

/// A device with the multipliers of one check on it.
pub(crate) struct OnDevice<'a> {
    key: &'a Key,
    device: Device,
    multipliers: Tensor,
    /// Whole blocks, aligned for words of 32 bits whatever the alignment of the tensor is.
    staging: Tensor,
    staged: i64,
}

fn signed(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

impl<'a> OnDevice<'a> {
    pub(crate) fn new(key: &'a Key, device: Device) -> Result<Self, EngineError> {
        Self::with_staging(key, device, STAGED)
    }

    /// `staged`: a multiple of the block.
    pub(super) fn with_staging(key: &'a Key, device: Device, staged: usize) -> Result<Self, EngineError> {
        let multipliers: Vec<i64> = key.multipliers.iter().map(|multiplier| multiplier.cast_signed()).collect();
        let staged = signed(staged);
        Ok(Self {
            key,
            device,
            multipliers: Tensor::f_from_slice(&multipliers)?.f_to_device(device)?,
            staging: Tensor::f_zeros([staged], (Kind::Uint8, device))?,
            staged,
        })
    }

    pub(crate) fn device(&self) -> Device {
        self.device
    }

    /// `tensor` lies on this device. A contiguous one is read where it lies, any other in pieces.
    pub(crate) fn hash(
        &mut self,
        head: &str,
        nbytes: usize,
        tensor: &Tensor,
        contiguous: bool,
    ) -> Result<[u8; 32], EngineError> {
        let _no_grad = tch::no_grad_guard();
        let mut hasher = self.key.begin(head, nbytes);
        let mut filled = 0;
        let tensor = tensor.f_detach()?;
        if contiguous {
            self.stage(&mut hasher, &mut filled, &tensor)?;
        } else {
            // Elements of up to 16 bytes: a piece takes no more than the staging area.
            pieces::for_each(&tensor, usize::try_from(self.staged / 16).unwrap_or(1), &mut |piece| {
                let plain = piece.f_resolve_conj()?.f_resolve_neg()?.f_contiguous()?;
                self.stage(&mut hasher, &mut filled, &plain)
            })?;
        }
        if filled > 0 {
            let padded = signed(BLOCK) * ((filled - 1) / signed(BLOCK) + 1);
            let _ = self.staging.f_narrow(0, filled, padded - filled)?.f_zero_()?;
            self.sum(&mut hasher, padded)?;
        }
        Ok(*hasher.finalize().as_bytes())
    }

    fn stage(&mut self, hasher: &mut ::blake3::Hasher, filled: &mut i64, plain: &Tensor) -> Result<(), EngineError> {
        let bytes = c10d::as_bytes(plain)?;
        let nbytes: i64 = c10d::sizes(&bytes).iter().product();
        let mut taken = 0;
        while taken < nbytes {
            let count = (self.staged - *filled).min(nbytes - taken);
            self.staging.f_narrow(0, *filled, count)?.f_copy_(&bytes.f_narrow(0, taken, count)?)?;
            taken += count;
            *filled += count;
            if *filled == self.staged {
                self.sum(hasher, self.staged)?;
                *filled = 0;
            }
        }
        Ok(())
    }

    /// The first level of the first `nbytes` staged, whole blocks.
    fn sum(&self, hasher: &mut ::blake3::Hasher, nbytes: i64) -> Result<(), EngineError> {
        let words = signed(WORDS);
        let staged = self.staging.f_narrow(0, 0, nbytes)?.f_view_dtype(Kind::Int)?.f_view([-1, words])?;
        // int32 times int64 is int64, and wraps.
        let sums = |shift: i64| {
            staged.f_mul(&self.multipliers.f_narrow(0, shift, words)?)?.f_sum_dim_intlist(
                [1_i64].as_slice(),
                false,
                Kind::Int64,
            )
        };
        let sums = c10d::materialize(&Tensor::f_stack(&[sums(0)?, sums(1)?], 1)?)?;
        // Numbers of the host's byte order, as are the words; hosts are little-endian.
        hasher.update(c10d::bytes(&sums)?);
        Ok(())
    }
}
