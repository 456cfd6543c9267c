//! What a tensor is, in words: dtypes and devices by name, and the one place that says which tensors are usable.

#![forbid(unsafe_code)]

use std::fmt;

use tch::{Kind, Tensor};

use crate::collective::c10d::{self, TensorFacts};
use crate::error::{EngineError, TensorProblem};

/// An element type, as libtorch numbers it (`c10::ScalarType`). Wider than [`tch::Kind`], which lacks the unsigned
/// integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DType(pub(crate) i8);

impl DType {
    pub(crate) const FLOAT32: Self = Self(6);

    /// tch's name for it, where it has one.
    pub(crate) fn kind(self) -> Option<Kind> {
        Some(match self.0 {
            0 => Kind::Uint8,
            1 => Kind::Int8,
            2 => Kind::Int16,
            3 => Kind::Int,
            4 => Kind::Int64,
            5 => Kind::Half,
            6 => Kind::Float,
            7 => Kind::Double,
            8 => Kind::ComplexHalf,
            9 => Kind::ComplexFloat,
            10 => Kind::ComplexDouble,
            11 => Kind::Bool,
            15 => Kind::BFloat16,
            23 => Kind::Float8e5m2,
            24 => Kind::Float8e4m3fn,
            25 => Kind::Float8e5m2fnuz,
            26 => Kind::Float8e4m3fnuz,
            _ => return None,
        })
    }

    /// The name that Python prints after `torch.`.
    pub(crate) fn name(self) -> Option<&'static str> {
        Some(match self.0 {
            0 => "uint8",
            1 => "int8",
            2 => "int16",
            3 => "int32",
            4 => "int64",
            5 => "float16",
            6 => "float32",
            7 => "float64",
            8 => "complex32",
            9 => "complex64",
            10 => "complex128",
            11 => "bool",
            12 => "qint8",
            13 => "quint8",
            14 => "qint32",
            15 => "bfloat16",
            23 => "float8_e5m2",
            24 => "float8_e4m3fn",
            25 => "float8_e5m2fnuz",
            26 => "float8_e4m3fnuz",
            27 => "uint16",
            28 => "uint32",
            29 => "uint64",
            44 => "float8_e8m0fnu",
            _ => return None,
        })
    }

    /// Gloo sums these (it has no kernels for the others, and ends in an error there).
    pub(crate) fn summable(self) -> bool {
        matches!(
            self.name(),
            Some("uint8" | "int8" | "int32" | "int64" | "float16" | "bfloat16" | "float32" | "float64")
        )
    }

    /// A floating type with fewer bits than float32.
    pub(crate) fn narrow_float(self) -> bool {
        matches!(self.name(), Some("float16" | "bfloat16"))
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "dtype {}", self.0),
        }
    }
}

/// A device, as libtorch numbers it (`c10::DeviceType`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DeviceName {
    kind: i8,
    index: i8,
}

impl DeviceName {
    const CPU: i8 = 0;
    const META: i8 = 14;

    pub(crate) fn is_cpu(self) -> bool {
        self.kind == Self::CPU
    }

    pub(crate) fn is_meta(self) -> bool {
        self.kind == Self::META
    }

    /// The kind without the index: what must agree between ranks.
    pub(crate) fn kind(self) -> String {
        match self.kind {
            Self::CPU => "cpu".into(),
            1 => "cuda".into(),
            12 => "xpu".into(),
            13 => "mps".into(),
            Self::META => "meta".into(),
            other => format!("device type {other}"),
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.kind())?;
        if self.index >= 0 && !self.is_cpu() {
            write!(f, ":{}", self.index)?;
        }
        Ok(())
    }
}

impl TensorFacts {
    pub(crate) fn dtype(&self) -> DType {
        DType(self.scalar_type)
    }

    pub(crate) fn device(&self) -> DeviceName {
        DeviceName { kind: self.device_type, index: self.device_index }
    }

    pub(crate) fn nbytes(&self) -> usize {
        usize::try_from(self.numel).unwrap_or(0) * usize::try_from(self.element_size).unwrap_or(0)
    }

    pub(crate) fn is_sparse(&self) -> bool {
        self.layout == 1
    }

    /// Whether the tensor holds plain bytes: defined, strided, not quantized, not meta.
    pub(crate) fn check_plain(&self) -> Result<(), TensorProblem> {
        if !self.defined {
            return Err(TensorProblem::Undefined);
        }
        if self.device().is_meta() {
            return Err(TensorProblem::Meta);
        }
        if self.quantized {
            return Err(TensorProblem::Quantized { dtype: self.dtype().to_string() });
        }
        match self.layout {
            0 => {}
            1 => return Err(TensorProblem::Sparse),
            _ => return Err(TensorProblem::Layout),
        }
        if self.dtype().name().is_none() {
            return Err(TensorProblem::Dtype { code: self.scalar_type });
        }
        Ok(())
    }
}

impl From<EngineError> for TensorProblem {
    fn from(error: EngineError) -> Self {
        Self::Engine { message: error.message().to_string() }
    }
}

/// The facts of a tensor, with the engine's refusal as a problem of that tensor.
pub(crate) fn inspect(tensor: &Tensor) -> Result<TensorFacts, TensorProblem> {
    Ok(c10d::inspect(tensor)?)
}
