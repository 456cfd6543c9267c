// Declarations only. See README.md beside these headers.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace gloo::transport {

// Held by unique_ptr in ProcessGroupGloo's send and receive works.
class UnboundBuffer {
 public:
  virtual ~UnboundBuffer();
};

} // namespace gloo::transport

namespace gloo::rendezvous {

// Base of ProcessGroupGloo::GlooStore, which only libtorch itself instantiates.
class Store {
 public:
  virtual ~Store();
  virtual void set(const std::string& key, const std::vector<char>& value) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(
      const std::vector<std::string>& keys,
      const std::chrono::milliseconds& timeout) = 0;
};

} // namespace gloo::rendezvous
