// SPDX-License-Identifier: Apache-2.0
#pragma once
// Switches of planted mutations: every mutant of a run is in one program, and the environment says which of them is on. Included
// into each mutated file from the command line (-include), never by the project itself.
//
//   TANDEM_MUTANT      number of the mutant that is on; none without it
//   TANDEM_MUTANT_LOG  file to which a line of JSON is appended when a case begins and when it ends

#include <type_traits>
#include <utility>

namespace tandem_mutation {

inline constexpr int kMostMutants = 4096;
extern int active;                           // 0: none
extern unsigned char reached[kMostMutants];  // since the case began

// Always inlined: files built for several instruction sets share no copy of it. Threads may write the same 1 at once.
[[gnu::always_inline]] inline bool on(int mutant) {
  __atomic_store_n(&reached[mutant], static_cast<unsigned char>(1), __ATOMIC_RELAXED);
  return active == mutant;
}

/// Ranks 0 and 1 in each other's place.
template <typename Rank>
[[gnu::always_inline]] inline Rank swapped(Rank rank) {
  return rank == Rank{0} ? Rank{1} : rank == Rank{1} ? Rank{0} : rank;
}

/// What nobody waits for, not even its destructor: it is never destroyed.
template <typename Work>
inline void leave(Work&& work) {
  static_cast<void>(new std::remove_cvref_t<Work>(std::forward<Work>(work)));
}

void begin_case(const char* name);
/// Ends the program at a case that failed, when a mutant is on: the rest would say nothing new.
void end_case(const char* name, const char* status, const char* check, double seconds);

}  // namespace tandem_mutation
