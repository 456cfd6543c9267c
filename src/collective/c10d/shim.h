// The C++ half of the fence: everything of c10d and of torch's tensor internals that the crate uses and `tch` lacks.
//
// One rule holds on every path: a posted work stays in its Group's ledger until it has been waited for, because a Gloo
// receive that is dropped earlier wedges its connection, and because a work that still runs still writes into its
// tensors, which the work itself keeps alive.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "rust/cxx.h"

namespace sft_sync {

// Turns the exception in flight into "<kind letter><message>"; the Rust side splits it again. The kind is decided here,
// by dynamic type where there is one.
std::string describe_current_exception() noexcept;

} // namespace sft_sync

namespace rust::behavior {

// cxx's hook for turning a C++ exception into a Rust error.
template <typename Try, typename Fail>
static void trycatch(Try&& func, Fail&& fail) noexcept {
  try {
    func();
  } catch (...) {
    fail(sft_sync::describe_current_exception());
  }
}

} // namespace rust::behavior

namespace sft_sync {

using Tensor = at::Tensor;
struct TensorFacts;

std::uint64_t header_abi_version() noexcept;
std::uint64_t library_abi_version() noexcept;

// Counts torch's CPU allocations of this process, for tests and benches. Installs an allocator around the one in use,
// at the first call, for good; later calls only reset the counts.
void start_counting_allocations() noexcept;
std::uint64_t allocation_count() noexcept;
std::uint64_t allocation_peak() noexcept;

// ---- tensors -------------------------------------------------------------------------------------------------------

TensorFacts inspect(const Tensor& tensor);
TensorFacts inspect_grad(const Tensor& parameter);
rust::Slice<const std::int64_t> sizes(const Tensor& tensor);
rust::Vec<std::int64_t> grad_sizes(const Tensor& parameter);
void clear_grad(const Tensor& parameter);
void bump_version(const Tensor& tensor);
// The bytes of a contiguous CPU tensor: a view, valid while the tensor's storage is neither replaced nor written.
rust::Slice<const std::uint8_t> bytes(const Tensor& tensor);
// Overwrites a contiguous CPU tensor of uint8 with as many bytes.
void write_bytes(const Tensor& tensor, rust::Slice<const std::uint8_t> source);
void prefetch(rust::Slice<const std::uint8_t> bytes) noexcept;

// The parameter's gradient, detached and fit to be written: an absent one is first set to zeros of the parameter's
// shape and layout, one whose elements share memory (an expanded one) is first replaced by a contiguous copy.
std::unique_ptr<Tensor> take_grad(const Tensor& parameter);
// The bytes of a plain contiguous tensor as a flat tensor of uint8 that shares its storage, outside autograd.
std::unique_ptr<Tensor> as_bytes(const Tensor& tensor);
// Detached, on the CPU, default-contiguous in logical order, lazy conjugate and negative bits resolved. Shares storage
// where that is possible.
std::unique_ptr<Tensor> materialize(const Tensor& tensor);

// Tensors, each held by a counted reference, that travel in one flat buffer.
class TensorList {
 public:
  // Held detached.
  void push(const Tensor& tensor);
  // Copies the members, one after another in logical order, to the front of `flat` (one-dimensional, contiguous; its
  // dtype may be another one), or back from there.
  void pack(const Tensor& flat) const;
  void unpack(const Tensor& flat) const;

 private:
  std::int64_t numel() const;
  std::vector<Tensor> tensors_;
};

std::unique_ptr<TensorList> new_tensor_list();

// ---- stores --------------------------------------------------------------------------------------------------------

// c10d stores lock inside; one object may serve several threads.
class Store {
 public:
  explicit Store(c10::intrusive_ptr<c10d::Store> store) : inner(std::move(store)) {}

  void set(rust::Str key, rust::Slice<const std::uint8_t> value) const;
  rust::Vec<std::uint8_t> get(rust::Str key) const;
  std::int64_t add(rust::Str key, std::int64_t amount) const;
  rust::Vec<std::uint8_t> compare_set(
      rust::Str key,
      rust::Slice<const std::uint8_t> expected,
      rust::Slice<const std::uint8_t> desired) const;
  bool has(rust::Str key) const;
  void wait(rust::Str key, std::uint64_t timeout_ms) const;
  void set_timeout(std::uint64_t timeout_ms) const;

  c10::intrusive_ptr<c10d::Store> inner;
};

// Binds (`is_server`, port 0 for any free one) or connects. Does not wait for the other ranks.
std::shared_ptr<Store> tcp_store(
    rust::Str host,
    std::uint16_t port,
    bool is_server,
    std::uint64_t timeout_ms);
std::uint16_t tcp_store_port(const Store& store);
std::shared_ptr<Store> file_store(rust::Str path);
std::shared_ptr<Store> hash_store();
std::shared_ptr<Store> prefix_store(rust::Str prefix, const Store& store);

// ---- groups --------------------------------------------------------------------------------------------------------

// A c10d backend and the ledger of its works. Used by one thread at a time.
class Group {
 public:
  Group(c10::intrusive_ptr<c10d::Backend> backend, int rank, int size);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Each posts one work and returns its ticket. `timeout_ms` bounds the waits inside the engine.
  std::uint64_t all_reduce_sum(const Tensor& tensor, std::uint64_t timeout_ms);
  std::uint64_t all_reduce_max(const Tensor& tensor, std::uint64_t timeout_ms);
  std::uint64_t broadcast(const Tensor& tensor, std::uint32_t root, std::uint64_t timeout_ms);
  // `output` holds `size` times the elements of `input`, by rank.
  std::uint64_t all_gather(const Tensor& output, const Tensor& input, std::uint64_t timeout_ms);
  std::uint64_t send(const Tensor& tensor, std::uint32_t destination, std::uint32_t tag);
  std::uint64_t receive(const Tensor& tensor, std::uint32_t source, std::uint32_t tag);
  std::uint64_t barrier(std::uint64_t timeout_ms);

  // Throws the work's failure, or a timeout after `timeout_ms`, which is never taken as "for ever". The ticket leaves
  // the ledger once the work has ended, in success or in failure.
  void wait(std::uint64_t ticket, std::uint64_t timeout_ms);

  // Closes every connection of the group, so that no work can go on and every peer is told at once.
  void abort() noexcept;
  // Waits for what is in the ledger, within `timeout_ms` in all; returns how many works are still running.
  std::size_t drain(std::uint64_t timeout_ms) noexcept;
  std::size_t outstanding() const noexcept;

 private:
  std::uint64_t record(c10::intrusive_ptr<c10d::Work> work);

  c10::intrusive_ptr<c10d::Backend> backend_;
  int rank_;
  int size_;
  std::uint64_t next_ticket_{0};
  std::map<std::uint64_t, c10::intrusive_ptr<c10d::Work>> ledger_;
};

// Connects a full mesh between `size` ranks. `interface` or `hostname` picks the network device; both empty: the
// engine's own choice.
std::unique_ptr<Group> gloo_group(
    const Store& store,
    std::uint32_t rank,
    std::uint32_t size,
    std::uint64_t timeout_ms,
    rust::Str interface,
    rust::Str hostname);

} // namespace sft_sync
