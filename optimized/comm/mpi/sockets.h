// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace tandem::sockets {

using Deadline = std::chrono::steady_clock::time_point;

/// A socket that listens on all addresses of this machine, and its port. Throws IoError.
[[nodiscard]] std::pair<int, std::uint16_t> listen_anywhere(int backlog);

/// Numeric IPv4 addresses of this machine's interfaces, without the loopback one.
[[nodiscard]] std::vector<std::string> own_addresses();
[[nodiscard]] std::string host_name();

/// A connected socket, or -1 with errno set.
[[nodiscard]] int connect_to(const std::string& address, std::uint16_t port, Deadline deadline);
/// The next connection, or -1 where none came before the deadline.
[[nodiscard]] int accept_from(int listening, Deadline deadline);

/// All bytes before the deadline, or false.
[[nodiscard]] bool write_all(int socket, const void* bytes, std::size_t size, Deadline deadline);
[[nodiscard]] bool read_all(int socket, void* bytes, std::size_t size, Deadline deadline);

/// For control messages: sent at once, and a peer whose machine is gone is noticed.
void prepare(int socket) noexcept;

}  // namespace tandem::sockets
