// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "harness/result_file.h"
#include "harness/statistics.h"

namespace tandem {

/// To what the gap between two machines belongs.
enum class Cause : std::uint8_t { compute, link, overlap, storage, unexplained };
[[nodiscard]] std::string_view name(Cause cause);

struct CauseShare {
  Cause cause = Cause::unexplained;
  double seconds = 0;  ///< B - A of this part in one step, summed over the cases that have it
  double share = 0;    ///< of the whole gap; negative: it works against it
  Ratio ratio;         ///< B / A of the part's own time (overlap: of exposed communication); NaN where A has none
};

struct Attribution {
  std::vector<CauseShare> causes;  ///< largest share first; empty where no case could be used
  Cause verdict = Cause::unexplained;
  std::string sentence;                 ///< "B's step takes 1.42 x the time of A's ...; 87 % of the gap is computing, ..."
  int cases = 0;                        ///< that passed in both files and have the split of their time
  double seconds_a = 0, seconds_b = 0;  ///< one step of each of them, together
  Ratio ratio;                          ///< seconds_b / seconds_a, the steps resampled on both sides
};

/// Of the same name and model, and of plans that differ at most in how the work is done: threads of a rank, overlap.
[[nodiscard]] bool same_work(const CaseResult& a, const CaseResult& b);

/// From the split of each case's median step T into compute C, communication busy M and exposed E, data D, checkpoint K and idle
/// I (docs/measuring.md), of cases of the same work. With hidden H = M - E, m = M_B / M_A, c = C_B / C_A:
///
///   compute  C_B - C_A          storage  (D_B + K_B) - (D_A + K_A)          unexplained  I_B - I_A
///   overlap  H* - H_B           H* = H_B moved into [H_A min(1, m, c), H_A max(1, m, c)]
///   link     (M_B - M_A) - (H* - H_A)
///
/// which add up to T_B - T_A. H*: with the same ability to overlap, as much time is hidden as before, more where there is more to
/// hide or more to hide it behind, less where there is less; what lies beyond that is the overlap's own gain or loss. The verdict
/// is the largest part in the direction of the gap; unexplained where the interval of T_B / T_A holds 1.
///
/// Results keep means over ranks: where one rank alone computes more slowly, the others wait, and half of what it takes longer or
/// more counts as communication.
[[nodiscard]] Attribution attribute_gap(const ResultFile& a, const ResultFile& b);

}  // namespace tandem
