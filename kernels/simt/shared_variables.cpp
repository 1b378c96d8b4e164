// SPDX-License-Identifier: Apache-2.0
#include "kernels/simt/shared_variables.h"

#include <elf.h>
#include <link.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>

namespace tandem::simt_gpu {
namespace {

constexpr int kPoison = 0xFF;

/// Place of a thread_local variable in the program's image of them.
struct Symbol {
  std::size_t offset = 0, size_bytes = 0;
};

/// Local to a function of this namespace: what g++ and clang++ (the ABI of Itanium C++) begin such names with.
bool is_shared_variable(std::string_view name) {
  return name.starts_with("_ZZN6tandem8simt_gpu") || name.starts_with("_ZZNK6tandem8simt_gpu");
}

template <class T>
std::vector<T> read_table(std::ifstream& file, const Elf64_Shdr& section) {
  std::vector<T> table(section.sh_size / sizeof(T));
  file.seekg(static_cast<std::streamoff>(section.sh_offset));
  file.read(reinterpret_cast<char*>(table.data()), static_cast<std::streamsize>(table.size() * sizeof(T)));
  return table;
}

/// Of this program's own file; nothing where it has no symbol table.
std::vector<Symbol> read_symbols() {
  std::ifstream file("/proc/self/exe", std::ios::binary);
  Elf64_Ehdr header{};
  file.read(reinterpret_cast<char*>(&header), sizeof header);
  if (!file || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64) return {};
  Elf64_Shdr all{};
  all.sh_offset = header.e_shoff;
  all.sh_size = std::uint64_t{header.e_shnum} * sizeof(Elf64_Shdr);
  const std::vector<Elf64_Shdr> sections = read_table<Elf64_Shdr>(file, all);
  std::vector<Symbol> found;
  for (const Elf64_Shdr& section : sections) {
    if (section.sh_type != SHT_SYMTAB || section.sh_link >= sections.size()) continue;
    const std::vector<Elf64_Sym> symbols = read_table<Elf64_Sym>(file, section);
    const std::vector<char> names = read_table<char>(file, sections[section.sh_link]);
    for (const Elf64_Sym& symbol : symbols) {
      if (ELF64_ST_TYPE(symbol.st_info) != STT_TLS || symbol.st_shndx == SHN_UNDEF || symbol.st_name >= names.size()) continue;
      if (is_shared_variable(&names[symbol.st_name])) found.push_back({symbol.st_value, symbol.st_size});
    }
  }
  return found;
}

/// Where the program's thread_local variables of the calling thread begin; null where there are none.
std::byte* thread_variables() {
  void* begin = nullptr;
  const auto program = [](dl_phdr_info* info, std::size_t /*size*/, void* to) {
    *static_cast<void**>(to) = info->dlpi_tls_data;
    return 1;  // the first is the program
  };
  dl_iterate_phdr(program, &begin);
  return static_cast<std::byte*>(begin);
}

void poison(std::span<std::byte> variable) { std::memset(variable.data(), kPoison, variable.size()); }

bool is_poisoned(std::span<const std::byte> variable) {
  return variable[0] == std::byte{kPoison} && std::memcmp(variable.data(), variable.data() + 1, variable.size() - 1) == 0;
}

thread_local SharedVariables t_variables;

}  // namespace

SharedVariables& shared_variables() { return t_variables; }

SharedVariables::SharedVariables() {
  static const std::vector<Symbol> symbols = read_symbols();
  std::byte* const begin = thread_variables();
  if (begin == nullptr) return;
  for (const Symbol& symbol : symbols) {
    if (symbol.size_bytes > 0) variables_.emplace_back(begin + symbol.offset, symbol.size_bytes);
  }
  for (const std::span<std::byte> variable : variables_) poison(variable);
}

void SharedVariables::begin_grid() {
  used_.clear();
  first_block_ = true;
}

void SharedVariables::end_block() {
  if (!std::exchange(first_block_, false)) {
    for (const std::span<std::byte> variable : used_) poison(variable);
    return;
  }
  for (const std::span<std::byte> variable : variables_) {
    if (is_poisoned(variable)) continue;
    used_.push_back(variable);
    poison(variable);
  }
}

void SharedVariables::end_grid() {
  first_block_ = true;
  end_block();
}

}  // namespace tandem::simt_gpu
