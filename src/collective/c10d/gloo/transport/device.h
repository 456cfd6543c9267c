// Declarations only. See README.md beside these headers.
#pragma once

namespace gloo::transport {

class Device;

} // namespace gloo::transport
