# Every target provides libtorch itself (see scripts/environment.sh), unless LIBTORCH or LIBTORCH_USE_PYTORCH is set.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
features := fault-injection,raw-engine
with := . scripts/environment.sh &&

.DEFAULT_GOAL := help
.PHONY: help demo test lint doc chaos bench clean

help: ## List the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 16

demo: ## Fine-tune a small transformer on 2 ranks, with everything asserted on the way.
	@$(with) cargo run --locked --example sft -- --ranks 2

test: ## Format, lints, documentation, and all tests.
	@$(with) cargo fmt --check
	@$(with) cargo clippy --locked --all-targets --features $(features) -- -D warnings
	@$(with) cargo clippy --locked --lib -- -D warnings
	@$(with) RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps --features $(features)
	@$(with) cargo test --locked --features $(features)

lint: ## Format and lints only.
	@$(with) cargo fmt --check
	@$(with) cargo clippy --locked --all-targets --features $(features) -- -D warnings

doc: ## Build the documentation into target/doc.
	@$(with) cargo doc --locked --no-deps

chaos: ## 200 seeded scenarios with one fault each. One alone: make chaos ARGS="--only SEED"
	@$(with) cargo test --locked --features $(features) --test chaos -- $(or $(ARGS),--count 200)

bench: ## The crate beside the raw engine and beside PyTorch; writes target/bench.json.
	@$(with) cargo bench --locked --features raw-engine --bench compare -- $(ARGS)

clean: ## Remove what was built. The libtorch cache stays.
	@cargo clean
