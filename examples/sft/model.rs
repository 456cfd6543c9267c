//! A decoder-only transformer over bytes: a frozen base, and low-rank adapters that are trained.

use tch::nn::{Path, VarStore};
use tch::{Device, Kind, Reduction, Tensor};

use crate::data::{Batch, IGNORED, VOCABULARY};

const WIDTH: i64 = 256;
const HEADS: i64 = 4;
const LAYERS: usize = 4;
const HIDDEN: i64 = 4 * WIDTH;
const LORA_RANK: i64 = 8;
/// What an adapter's output is multiplied with.
const LORA_SCALE: f64 = 2.0;

/// Names of the adapter that no rank ever uses begin with this.
pub(crate) const RESERVE: &str = "reserve.";

/// The model with all its variables.
#[derive(Debug)]
pub(crate) struct Model {
    store: VarStore,
    tokens: Tensor,
    positions: Tensor,
    blocks: Vec<Block>,
    /// For examples with a long prompt only: a rank that has none in a step has no gradient for it.
    long_prompt: Lora,
    head: Linear,
    head_bias: Tensor,
}

impl Model {
    /// The base follows from `seed` alone. The adapters follow from `adapter_seed`, which may differ between ranks:
    /// broadcasting makes them those of rank 0.
    pub(crate) fn new(context: u16, seed: i64, adapter_seed: i64) -> Self {
        let store = VarStore::new(Device::Cpu);
        let root = store.root();
        tch::manual_seed(seed);
        let tokens = frozen(&(&root / "tokens"), &[VOCABULARY, WIDTH], 0.5);
        let positions = frozen(&(&root / "positions"), &[i64::from(context), WIDTH], 0.1);
        let bases: Vec<BlockBase> = (0..LAYERS).map(|layer| BlockBase::new(&(&root / "blocks" / layer))).collect();
        let head_base = frozen(&(&root / "head"), &[VOCABULARY, WIDTH], 0.02);
        tch::manual_seed(adapter_seed);
        let blocks =
            bases.into_iter().enumerate().map(|(layer, base)| Block::new(&(&root / "blocks" / layer), base)).collect();
        let long_prompt = Lora::new(&(&root / "long_prompt"), WIDTH, WIDTH);
        // Declared, trainable, known to the optimizer, and in no graph: weight decay must not touch it either.
        let _reserve = Lora::new(&(&root / "reserve"), WIDTH, WIDTH);
        let head = Linear::adapted(&(&root / "head"), head_base);
        let head_bias = root.sub("head").add("bias", Tensor::zeros([VOCABULARY], (Kind::Float, Device::Cpu)), true);
        Self { store, tokens, positions, blocks, long_prompt, head, head_bias }
    }

    /// Its variables, the frozen ones included.
    pub(crate) fn store(&self) -> &VarStore {
        &self.store
    }

    /// The sum of the losses of all response tokens, in float64: sums over shares of a batch must add up.
    pub(crate) fn loss_sum(&self, batch: &Batch) -> Tensor {
        let logits = self.logits(batch);
        logits
            .view([-1, VOCABULARY])
            .cross_entropy_loss::<Tensor>(&batch.targets.view(-1), None, Reduction::None, IGNORED, 0.0)
            .sum(Kind::Double)
    }

    fn logits(&self, batch: &Batch) -> Tensor {
        let length = batch.inputs.size()[1];
        let tokens = Tensor::embedding(&self.tokens, &batch.inputs, -1, false, false);
        let mut x = tokens + self.positions.narrow(0, 0, length);
        for block in &self.blocks {
            x = block.forward(&x);
        }
        if let Some(long) = &batch.long {
            x = &x + self.long_prompt.forward(&normalized(&x)) * long;
        }
        self.head.forward(&normalized(&x)) + &self.head_bias
    }
}

/// The frozen part of a block.
struct BlockBase {
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    up: Tensor,
    down: Tensor,
}

impl BlockBase {
    fn new(path: &Path<'_>) -> Self {
        let square = |name: &str| frozen(&(path / name), &[WIDTH, WIDTH], fan_in(WIDTH));
        Self {
            query: square("query"),
            key: square("key"),
            value: square("value"),
            output: square("output"),
            up: frozen(&(path / "up"), &[HIDDEN, WIDTH], fan_in(WIDTH)),
            down: frozen(&(path / "down"), &[WIDTH, HIDDEN], fan_in(HIDDEN)),
        }
    }
}

/// Attention and a perceptron, each behind a layer norm and added to what came in.
#[derive(Debug)]
struct Block {
    query: Linear,
    key: Tensor,
    value: Linear,
    output: Tensor,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(path: &Path<'_>, base: BlockBase) -> Self {
        Self {
            query: Linear::adapted(&(path / "query"), base.query),
            key: base.key,
            value: Linear::adapted(&(path / "value"), base.value),
            output: base.output,
            up: Linear::adapted(&(path / "up"), base.up),
            down: Linear::adapted(&(path / "down"), base.down),
        }
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let x = x + self.attention(&normalized(x));
        let hidden = self.up.forward(&normalized(&x)).gelu("tanh");
        &x + self.down.forward(&hidden)
    }

    fn attention(&self, x: &Tensor) -> Tensor {
        let size = x.size();
        let (examples, length) = (size[0], size[1]);
        let heads = |x: Tensor| x.view([examples, length, HEADS, WIDTH / HEADS]).transpose(1, 2);
        let attended = Tensor::scaled_dot_product_attention::<Tensor>(
            &heads(self.query.forward(x)),
            &heads(plain(x, &self.key)),
            &heads(self.value.forward(x)),
            None,
            0.0,
            true,
            None,
            false,
        );
        plain(&attended.transpose(1, 2).reshape([examples, length, WIDTH]), &self.output)
    }
}

/// A frozen matrix and its adapter.
#[derive(Debug)]
struct Linear {
    weight: Tensor,
    lora: Lora,
}

impl Linear {
    fn adapted(path: &Path<'_>, weight: Tensor) -> Self {
        let size = weight.size();
        let lora = Lora::new(path, size[1], size[0]);
        Self { weight, lora }
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        plain(x, &self.weight) + self.lora.forward(x)
    }
}

/// A matrix of low rank that is added to a frozen one. It starts at zero, since `up` does.
#[derive(Debug)]
struct Lora {
    down: Tensor,
    up: Tensor,
}

impl Lora {
    fn new(path: &Path<'_>, inputs: i64, outputs: i64) -> Self {
        let options = (Kind::Float, Device::Cpu);
        Self {
            down: path.add("lora_down", Tensor::randn([LORA_RANK, inputs], options) * fan_in(inputs), true),
            up: path.add("lora_up", Tensor::zeros([outputs, LORA_RANK], options), true),
        }
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        plain(&plain(x, &self.down), &self.up) * LORA_SCALE
    }
}

fn plain(x: &Tensor, weight: &Tensor) -> Tensor {
    x.linear::<Tensor>(weight, None)
}

fn normalized(x: &Tensor) -> Tensor {
    x.layer_norm::<Tensor>([WIDTH], None, None, 1e-5, false)
}

/// The deviation that keeps the size of what passes through a random matrix.
#[allow(clippy::cast_precision_loss)] // Widths are small.
fn fan_in(inputs: i64) -> f64 {
    (inputs as f64).sqrt().recip()
}

fn frozen(path: &Path<'_>, size: &[i64], deviation: f64) -> Tensor {
    path.add("weight", Tensor::randn(size, (Kind::Float, Device::Cpu)) * deviation, false)
}
