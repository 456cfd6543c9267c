#include "sft-sync/src/collective/c10d/shim.h"

#include <cxxabi.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <system_error>

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <c10/core/Allocator.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/version.h>

#include "sft-sync/src/collective/c10d.rs.h"

namespace sft_sync {

namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr char kTimeout = 'T';
constexpr char kConnection = 'C';
constexpr char kOther = 'O';

// Zero would mean "for ever" to c10d.
milliseconds at_least_one(std::uint64_t timeout_ms) {
  constexpr std::uint64_t kMost = 1ULL << 40;
  return milliseconds(static_cast<std::int64_t>(std::clamp<std::uint64_t>(timeout_ms, 1, kMost)));
}

// The work had not ended when its time was up.
struct WorkTimeout : std::runtime_error {
  using std::runtime_error::runtime_error;
};

bool mentions_timeout(const std::string& message) {
  // Gloo and the stores throw one type for a timeout and for a lost connection; only their text differs.
  return message.find("Timed out") != std::string::npos || message.find("timed out") != std::string::npos ||
      message.find("Wait timeout") != std::string::npos || message.find("imeout after") != std::string::npos;
}

char io_kind(const std::string& message) {
  return mentions_timeout(message) ? kTimeout : kConnection;
}

// Without the "[file:line] " that Gloo puts in front, and without its advice to look at the remote worker's log.
std::string encode(char kind, const std::string& message) {
  auto begin = !message.empty() && message.front() == '[' ? message.find("] ") : std::string::npos;
  begin = begin == std::string::npos ? 0 : begin + 2;
  const auto end = message.find(". This is typically caused by");
  return std::string(1, kind) + message.substr(begin, end == std::string::npos ? end : end - begin);
}

// The first line is the message; libtorch may append a C++ stack trace.
std::string first_line(const c10::Error& error) {
  return error.what_without_backtrace();
}

bool thrown_by_gloo_io() {
  // gloo::IoException is not declared in any header that libtorch ships, so it cannot be named in a catch clause.
  const std::type_info* type = abi::__cxa_current_exception_type();
  return type != nullptr && std::string(type->name()).find("4gloo11IoException") != std::string::npos;
}

} // namespace

std::string describe_current_exception() noexcept {
  try {
    try {
      throw;
    } catch (const WorkTimeout& error) {
      return encode(kTimeout, error.what());
    } catch (const c10::DistNetworkError& error) {
      return encode(io_kind(error.what()), first_line(error));
    } catch (const c10::DistStoreError& error) {
      return encode(io_kind(error.what()), first_line(error));
    } catch (const c10::DistError& error) {
      return encode(io_kind(error.what()), first_line(error));
    } catch (const c10::Error& error) {
      // HashStore's "Wait timeout" is one of these.
      return encode(mentions_timeout(error.what()) ? kTimeout : kOther, first_line(error));
    } catch (const std::system_error& error) {
      return encode(io_kind(error.what()), error.what());
    } catch (const std::exception& error) {
      return encode(thrown_by_gloo_io() ? io_kind(error.what()) : kOther, error.what());
    } catch (...) {
      return encode(kOther, "an exception that is no std::exception");
    }
  } catch (...) {
    return std::string(1, kOther);
  }
}

std::uint64_t header_abi_version() noexcept {
  return TORCH_ABI_VERSION;
}

std::uint64_t library_abi_version() noexcept {
  return aoti_torch_abi_version();
}

namespace {

class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* inner) : inner_(inner) {}

  c10::DataPtr allocate(std::size_t nbytes) override {
    auto held = std::make_unique<Held>(Held{this, nbytes, inner_->allocate(nbytes)});
    count.fetch_add(1);
    const auto now = current.fetch_add(nbytes) + nbytes;
    auto most = peak.load();
    while (now > most && !peak.compare_exchange_weak(most, now)) {
    }
    void* data = held->memory.get();
    const auto device = held->memory.device();
    return {data, held.release(), &release, device};
  }

  void copy_data(void* destination, const void* source, std::size_t count) const override {
    default_copy_data(destination, source, count);
  }

  std::atomic<std::uint64_t> count{0};
  std::atomic<std::uint64_t> current{0};
  std::atomic<std::uint64_t> peak{0};

 private:
  struct Held {
    CountingAllocator* owner;
    std::size_t nbytes;
    c10::DataPtr memory;
  };

  static void release(void* context) {
    const std::unique_ptr<Held> held(static_cast<Held*>(context));
    held->owner->current.fetch_sub(held->nbytes);
  }

  c10::Allocator* inner_;
};

// Never freed: memory that it has given out names it.
std::atomic<CountingAllocator*> counting{nullptr};

} // namespace

void start_counting_allocations() noexcept {
  static std::once_flag once;
  std::call_once(once, [] {
    counting = new CountingAllocator(c10::GetAllocator(c10::DeviceType::CPU));
    c10::SetAllocator(c10::DeviceType::CPU, counting.load(), /*priority=*/255);
  });
  auto* allocator = counting.load();
  allocator->count = 0;
  allocator->current = 0;
  allocator->peak = 0;
}

std::uint64_t allocation_count() noexcept {
  const auto* allocator = counting.load();
  return allocator == nullptr ? 0 : allocator->count.load();
}

std::uint64_t allocation_peak() noexcept {
  const auto* allocator = counting.load();
  return allocator == nullptr ? 0 : allocator->peak.load();
}

// ---- tensors -------------------------------------------------------------------------------------------------------

namespace {

enum Layout : std::uint8_t { kStrided = 0, kSparse = 1, kOtherLayout = 2 };

bool plain(const Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

bool raw_copyable(const Tensor& tensor, const Tensor& flat) {
  return flat.is_cpu() && tensor.is_cpu() && plain(tensor) && tensor.scalar_type() == flat.scalar_type();
}

void check_flat(const Tensor& flat, std::int64_t needed) {
  TORCH_CHECK(flat.dim() == 1 && flat.is_contiguous() && flat.numel() >= needed, "flat buffer too small");
}

std::string text(rust::Str value) {
  return std::string(value.data(), value.size());
}

} // namespace

TensorFacts inspect(const Tensor& tensor) {
  TensorFacts facts{};
  facts.defined = tensor.defined();
  if (!facts.defined) {
    return facts;
  }
  facts.identity = reinterpret_cast<std::uintptr_t>(tensor.unsafeGetTensorImpl());
  facts.scalar_type = static_cast<std::int8_t>(tensor.scalar_type());
  facts.element_size = tensor.element_size();
  facts.device_type = static_cast<std::int8_t>(tensor.device().type());
  facts.device_index = tensor.device().has_index() ? tensor.device().index() : -1;
  facts.quantized = tensor.is_quantized();
  facts.requires_grad = tensor.requires_grad();
  facts.is_leaf = tensor.is_leaf();
  switch (tensor.layout()) {
    case at::kStrided:
      facts.layout = kStrided;
      break;
    case at::kSparse:
    case at::kSparseCsr:
    case at::kSparseCsc:
    case at::kSparseBsr:
    case at::kSparseBsc:
      facts.layout = kSparse;
      break;
    default:
      facts.layout = kOtherLayout;
  }
  facts.numel = tensor.numel();
  if (facts.layout != kStrided) {
    return facts;
  }
  facts.contiguous = plain(tensor);
  facts.dense = tensor.is_non_overlapping_and_dense();
  facts.overlapping = at::has_internal_overlap(tensor) == at::MemOverlap::Yes;
  if (facts.numel > 0 && tensor.has_storage() && !tensor.is_meta()) {
    std::int64_t last = 0;
    for (std::int64_t d = 0; d < tensor.dim(); ++d) {
      last += (tensor.size(d) - 1) * tensor.stride(d);
    }
    facts.begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
    facts.end = facts.begin + (static_cast<std::uint64_t>(last) + 1) * facts.element_size;
  }
  return facts;
}

TensorFacts inspect_grad(const Tensor& parameter) {
  return parameter.defined() ? inspect(parameter.grad()) : TensorFacts{};
}

rust::Slice<const std::int64_t> sizes(const Tensor& tensor) {
  if (!tensor.defined()) {
    return {};
  }
  const auto view = tensor.sizes();
  return {view.data(), view.size()};
}

rust::Vec<std::int64_t> grad_sizes(const Tensor& parameter) {
  rust::Vec<std::int64_t> out;
  for (const auto size : parameter.grad().sizes()) {
    out.push_back(size);
  }
  return out;
}

void clear_grad(const Tensor& parameter) {
  parameter.mutable_grad().reset();
}

void bump_version(const Tensor& tensor) {
  // An inference tensor has no counter, and autograd refuses it anyway.
  if (!tensor.is_inference()) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

rust::Slice<const std::uint8_t> bytes(const Tensor& tensor) {
  TORCH_CHECK(tensor.is_cpu() && plain(tensor), "bytes are read of plain contiguous CPU tensors only");
  if (tensor.numel() == 0) {
    return {};
  }
  return {static_cast<const std::uint8_t*>(tensor.const_data_ptr()), tensor.nbytes()};
}

void write_bytes(const Tensor& tensor, rust::Slice<const std::uint8_t> source) {
  TORCH_CHECK(tensor.is_cpu() && plain(tensor) && tensor.nbytes() == source.size(), "bytes do not fit the tensor");
  if (!source.empty()) {
    std::memcpy(tensor.mutable_data_ptr(), source.data(), source.size());
  }
}

void prefetch(rust::Slice<const std::uint8_t> bytes) noexcept {
  constexpr std::size_t cache_line = 64;
  for (std::size_t offset = 0; offset < bytes.size(); offset += cache_line) {
    __builtin_prefetch(bytes.data() + offset);
  }
}

std::unique_ptr<Tensor> take_grad(const Tensor& parameter) {
  const c10::AutoGradMode no_grad(false);
  auto& grad = parameter.mutable_grad();
  if (!grad.defined()) {
    grad = at::zeros_like(parameter.detach());
  } else if (!grad.is_non_overlapping_and_dense()) {
    grad = grad.detach().contiguous();
  }
  return std::make_unique<Tensor>(grad.detach());
}

std::unique_ptr<Tensor> as_bytes(const Tensor& tensor) {
  TORCH_CHECK(plain(tensor), "only a plain contiguous tensor can be seen as bytes");
  // Not view(-1): a single element counts as contiguous whatever its stride is, and a view would keep that stride.
  return std::make_unique<Tensor>(tensor.detach().as_strided({tensor.numel()}, {1}).view(at::kByte));
}

std::unique_ptr<Tensor> materialize(const Tensor& tensor) {
  const c10::AutoGradMode no_grad(false);
  return std::make_unique<Tensor>(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous());
}

void TensorList::push(const Tensor& tensor) {
  tensors_.push_back(tensor.detach());
}

std::int64_t TensorList::numel() const {
  std::int64_t total = 0;
  for (const auto& tensor : tensors_) {
    total += tensor.numel();
  }
  return total;
}

void TensorList::pack(const Tensor& flat) const {
  const c10::AutoGradMode no_grad(false);
  check_flat(flat, numel());
  std::int64_t offset = 0;
  for (const auto& tensor : tensors_) {
    const auto count = tensor.numel();
    if (count == 0) {
      continue;
    }
    if (raw_copyable(tensor, flat)) {
      std::memcpy(
          static_cast<char*>(flat.mutable_data_ptr()) + offset * flat.element_size(),
          tensor.const_data_ptr(),
          tensor.nbytes());
    } else {
      flat.narrow(0, offset, count).view(tensor.sizes()).copy_(tensor);
    }
    offset += count;
  }
}

void TensorList::unpack(const Tensor& flat) const {
  const c10::AutoGradMode no_grad(false);
  check_flat(flat, numel());
  std::int64_t offset = 0;
  for (const auto& tensor : tensors_) {
    const auto count = tensor.numel();
    if (count == 0) {
      continue;
    }
    if (raw_copyable(tensor, flat)) {
      std::memcpy(
          tensor.mutable_data_ptr(),
          static_cast<const char*>(flat.const_data_ptr()) + offset * flat.element_size(),
          tensor.nbytes());
    } else {
      tensor.copy_(flat.narrow(0, offset, count).view(tensor.sizes()));
    }
    offset += count;
  }
}

std::unique_ptr<TensorList> new_tensor_list() {
  return std::make_unique<TensorList>();
}

// ---- stores --------------------------------------------------------------------------------------------------------

namespace {

std::vector<std::uint8_t> vector_of(rust::Slice<const std::uint8_t> bytes) {
  return {bytes.begin(), bytes.end()};
}

rust::Vec<std::uint8_t> rust_vec(const std::vector<std::uint8_t>& bytes) {
  rust::Vec<std::uint8_t> out;
  out.reserve(bytes.size());
  for (const auto byte : bytes) {
    out.push_back(byte);
  }
  return out;
}

} // namespace

void Store::set(rust::Str key, rust::Slice<const std::uint8_t> value) const {
  inner->set(text(key), vector_of(value));
}

rust::Vec<std::uint8_t> Store::get(rust::Str key) const {
  return rust_vec(inner->get(text(key)));
}

std::int64_t Store::add(rust::Str key, std::int64_t amount) const {
  return inner->add(text(key), amount);
}

rust::Vec<std::uint8_t> Store::compare_set(
    rust::Str key,
    rust::Slice<const std::uint8_t> expected,
    rust::Slice<const std::uint8_t> desired) const {
  return rust_vec(inner->compareSet(text(key), vector_of(expected), vector_of(desired)));
}

bool Store::has(rust::Str key) const {
  return inner->check({text(key)});
}

void Store::wait(rust::Str key, std::uint64_t timeout_ms) const {
  inner->wait({text(key)}, at_least_one(timeout_ms));
}

void Store::set_timeout(std::uint64_t timeout_ms) const {
  inner->setTimeout(at_least_one(timeout_ms));
}

std::shared_ptr<Store> tcp_store(rust::Str host, std::uint16_t port, bool is_server, std::uint64_t timeout_ms) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = is_server;
  options.waitWorkers = false;
  options.timeout = at_least_one(timeout_ms);
  return std::make_shared<Store>(c10::make_intrusive<c10d::TCPStore>(text(host), options));
}

std::uint16_t tcp_store_port(const Store& store) {
  const auto* tcp = dynamic_cast<const c10d::TCPStore*>(store.inner.get());
  TORCH_CHECK(tcp != nullptr, "not a TCPStore");
  return tcp->getPort();
}

std::shared_ptr<Store> file_store(rust::Str path) {
  // -1 workers: the file stays when the store goes, since another rank may still read it.
  return std::make_shared<Store>(c10::make_intrusive<c10d::FileStore>(text(path), -1));
}

std::shared_ptr<Store> hash_store() {
  return std::make_shared<Store>(c10::make_intrusive<c10d::HashStore>());
}

std::shared_ptr<Store> prefix_store(rust::Str prefix, const Store& store) {
  return std::make_shared<Store>(c10::make_intrusive<c10d::PrefixStore>(text(prefix), store.inner));
}

// ---- groups --------------------------------------------------------------------------------------------------------

Group::Group(c10::intrusive_ptr<c10d::Backend> backend, int rank, int size)
    : backend_(std::move(backend)), rank_(rank), size_(size) {}

Group::~Group() {
  if (!ledger_.empty()) {
    abort();
    drain(2000);
  }
  if (!ledger_.empty()) {
    // The backend's destructor waits for its works for ever. Leaking it and them is the only bounded way out; the works
    // keep the tensors that they still write to.
    for (auto& entry : ledger_) {
      static_cast<void>(entry.second.release());
    }
    static_cast<void>(backend_.release());
  }
}

std::uint64_t Group::record(c10::intrusive_ptr<c10d::Work> work) {
  const auto ticket = next_ticket_++;
  ledger_.emplace(ticket, std::move(work));
  return ticket;
}

std::uint64_t Group::all_reduce_sum(const Tensor& tensor, std::uint64_t timeout_ms) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.timeout = at_least_one(timeout_ms);
  return record(backend_->allreduce(tensors, options));
}

std::uint64_t Group::all_reduce_max(const Tensor& tensor, std::uint64_t timeout_ms) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  options.timeout = at_least_one(timeout_ms);
  return record(backend_->allreduce(tensors, options));
}

std::uint64_t Group::broadcast(const Tensor& tensor, std::uint32_t root, std::uint64_t timeout_ms) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  options.timeout = at_least_one(timeout_ms);
  return record(backend_->broadcast(tensors, options));
}

std::uint64_t Group::all_gather(const Tensor& output, const Tensor& input, std::uint64_t timeout_ms) {
  Tensor out = output;
  Tensor in = input;
  c10d::AllgatherOptions options;
  options.timeout = at_least_one(timeout_ms);
  return record(backend_->_allgather_base(out, in, options));
}

std::uint64_t Group::send(const Tensor& tensor, std::uint32_t destination, std::uint32_t tag) {
  std::vector<at::Tensor> tensors{tensor};
  return record(backend_->send(tensors, static_cast<int>(destination), static_cast<int>(tag)));
}

std::uint64_t Group::receive(const Tensor& tensor, std::uint32_t source, std::uint32_t tag) {
  std::vector<at::Tensor> tensors{tensor};
  return record(backend_->recv(tensors, static_cast<int>(source), static_cast<int>(tag)));
}

std::uint64_t Group::barrier(std::uint64_t timeout_ms) {
  c10d::BarrierOptions options;
  options.timeout = at_least_one(timeout_ms);
  return record(backend_->barrier(options));
}

void Group::wait(std::uint64_t ticket, std::uint64_t timeout_ms) {
  const auto entry = ledger_.find(ticket);
  TORCH_CHECK(entry != ledger_.end(), "no work with this ticket is outstanding");
  const auto work = entry->second;
  const auto timeout = at_least_one(timeout_ms);
  try {
    if (!work->wait(timeout)) {
      ledger_.erase(entry);
      throw std::runtime_error("the work was aborted");
    }
    ledger_.erase(entry);
  } catch (...) {
    if (work->isCompleted()) {
      ledger_.erase(ticket);
      throw;
    }
    // Still running, and so it stays in the ledger.
    throw WorkTimeout("the work had not ended after " + std::to_string(timeout.count()) + " ms");
  }
}

void Group::abort() noexcept {
  // Neither abort() nor shutdown() of ProcessGroupGloo closes connections. A receive that times out closes all of them,
  // and a receive on a tag that nobody sends on always times out. Where posting fails, that connection is closed
  // already, and the next peer is tried.
  constexpr int kUnusedTag = 0x7fffffff;
  for (int step = 1; step < size_; ++step) {
    try {
      std::vector<at::Tensor> tensors{at::empty({1}, at::kByte)};
      const auto work = backend_->recv(tensors, (rank_ + step) % size_, kUnusedTag);
      record(work);
      work->wait(milliseconds(1));
    } catch (...) {
      const bool timed_out = describe_current_exception().front() == kTimeout;
      if (timed_out) {
        break;
      }
    }
  }
  // A failed wait above has ended its work; what is recorded is found ended by the next drain.
}

std::size_t Group::drain(std::uint64_t timeout_ms) noexcept {
  const auto deadline = Clock::now() + at_least_one(timeout_ms);
  for (auto entry = ledger_.begin(); entry != ledger_.end();) {
    const auto work = entry->second;
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
    try {
      work->wait(std::max(left, milliseconds(1)));
    } catch (...) {
      if (!work->isCompleted()) {
        ++entry;
        continue;
      }
    }
    entry = ledger_.erase(entry);
  }
  return ledger_.size();
}

std::size_t Group::outstanding() const noexcept {
  return ledger_.size();
}

std::unique_ptr<Group> gloo_group(
    const Store& store,
    std::uint32_t rank,
    std::uint32_t size,
    std::uint64_t timeout_ms,
    rust::Str interface,
    rust::Str hostname) {
  const auto timeout = at_least_one(timeout_ms);
  c10::intrusive_ptr<c10d::ProcessGroupGloo::Options> options;
  if (interface.empty() && hostname.empty()) {
    options = c10d::ProcessGroupGloo::Options::create_default(timeout);
  } else {
    options = c10d::ProcessGroupGloo::Options::create(timeout);
    options->devices.push_back(
        interface.empty() ? c10d::ProcessGroupGloo::createDeviceForHostname(text(hostname))
                          : c10d::ProcessGroupGloo::createDeviceForInterface(text(interface)));
  }
  auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(
      store.inner, static_cast<int>(rank), static_cast<int>(size), std::move(options));
  return std::make_unique<Group>(std::move(backend), static_cast<int>(rank), static_cast<int>(size));
}

} // namespace sft_sync
