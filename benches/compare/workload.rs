//! The parameter lists that are measured.

use clap::ValueEnum;
use sft_sync::Parameters;
use tch::{Device, Kind, Tensor};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Workload {
    /// A full fine-tune: 64 tensors of 4 MiB.
    Full,
    /// Adapters: 192 tensors of 128 KiB.
    Lora,
    /// Many small ones: 500 of 64 and 500 of 64 x 64 elements.
    Small,
}

impl Workload {
    pub(crate) const ALL: [Self; 3] = [Self::Full, Self::Lora, Self::Small];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Lora => "lora",
            Self::Small => "small",
        }
    }

    fn shapes(self) -> Vec<Vec<i64>> {
        match self {
            Self::Full => vec![vec![1024, 1024]; 64],
            Self::Lora => vec![vec![128, 256]; 192],
            Self::Small => [vec![64], vec![64, 64]].into_iter().cycle().take(1000).collect(),
        }
    }

    /// Leaves with a gradient each, of float32 as everything here.
    pub(crate) fn tensors(self) -> Vec<Tensor> {
        self.shapes()
            .iter()
            .map(|shape| {
                let tensor = Tensor::zeros(shape, (Kind::Float, Device::Cpu)).set_requires_grad(true);
                (&tensor * 1.0).sum(Kind::Float).backward();
                tensor
            })
            .collect()
    }

    pub(crate) fn parameters(tensors: &[Tensor]) -> Parameters {
        let named = tensors.iter().enumerate().map(|(index, tensor)| (format!("p{index:04}"), tensor.shallow_clone()));
        Parameters::from_named(named).expect("the names are different")
    }

    pub(crate) fn nbytes(self) -> i64 {
        4 * self.shapes().iter().map(|shape| shape.iter().product::<i64>()).sum::<i64>()
    }
}
