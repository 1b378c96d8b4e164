// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

/// What a span of time was spent on. A span is classified where it is recorded, never by its name.
enum class Activity : std::uint8_t {
  compute,     ///< forward, backward, recompute
  optimizer,   ///< norm, clip, update
  transfer,    ///< bytes of a collective or message moving (and being summed)
  wait,        ///< blocked on a peer: arrival at a collective, an empty receive
  data,        ///< waiting for the next batch
  checkpoint,  ///< blocked by a snapshot or a save
  step,        ///< one whole training step; encloses the others
};
[[nodiscard]] std::string_view name(Activity activity);

/// What communicated bytes are for; the keys of `bytes_by_purpose`.
enum class Purpose : std::uint8_t { gradient, parameter, activation, other };
inline constexpr std::size_t kPurposes = 4;
[[nodiscard]] std::string_view name(Purpose purpose);

/// The lane of a rank that a span ran on: the compute thread or the communication (progress) thread.
enum class Lane : std::uint8_t { compute, communication };

struct Span {
  std::string name;  ///< "forward h.3", "all_reduce bucket 2"; for people only
  Activity activity = Activity::compute;
  Purpose purpose = Purpose::other;
  Lane lane = Lane::compute;
  std::int64_t bytes = 0;  ///< on the wire, sent by this rank; 0 for compute
  int step = -1;
  std::int64_t begin_ns = 0;  ///< steady clock, common origin for all ranks of a process
  std::int64_t end_ns = 0;
};

/// For core/io/binary.h.
template <class Archive>
void serialize(Archive& archive, Span& span) {
  archive(span.name, span.activity, span.purpose, span.lane, span.bytes, span.step, span.begin_ns, span.end_ns);
}

/// Told of spans as they begin and end, for a profiler that shows them beside what the machine does (kernels.h: nvtx_observer()).
/// The ranges of a thread nest; any thread.
class SpanObserver {
 public:
  virtual ~SpanObserver() = default;
  virtual void begin(const std::string& name, Activity activity) noexcept = 0;
  /// Of the range that this thread began last.
  virtual void end() noexcept = 0;
};

/// Spans of one rank, in order of their end. Plain data: recorded by the engine, judged by the harness. Thread-safe
/// (compute and communication threads of the rank both record).
class Timeline {
 public:
  [[nodiscard]] static std::int64_t now_ns() noexcept {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  }

  void record(Span span);
  [[nodiscard]] std::vector<Span> spans() const;
  /// Those recorded since there had been `count`, as far as they are kept; and how many there have been.
  [[nodiscard]] std::vector<Span> spans_from(std::size_t count) const;
  [[nodiscard]] std::size_t count() const;
  void clear();
  /// Of more than `most` spans the older ones are dropped, up to a half of them at a time: a run of weeks has no end of them.
  void keep_last(std::size_t most);
  void set_enabled(bool enabled) noexcept { enabled_ = enabled; }
  [[nodiscard]] bool enabled() const noexcept { return enabled_; }
  /// Borrowed; null: none, as at the beginning. Told of what is not recorded as well. Set while no span is open.
  void set_observer(SpanObserver* observer) noexcept { observer_.store(observer, std::memory_order_relaxed); }
  [[nodiscard]] SpanObserver* observer() const noexcept { return observer_.load(std::memory_order_relaxed); }

 private:
  mutable std::mutex mutex_;
  std::vector<Span> spans_;
  std::size_t dropped_ = 0, most_ = 0;  // 0: all are kept
  bool enabled_ = true;
  std::atomic<SpanObserver*> observer_ = nullptr;
};

/// A range that the timeline's observer is told of, if there is one, and nothing else: around what becomes a span only when it
/// has ended. Ends on the thread that it began on.
class ObservedRange {
 public:
  ObservedRange(const Timeline* timeline, const std::string& name, Activity activity)
      : observer_(timeline != nullptr ? timeline->observer() : nullptr) {
    if (observer_ != nullptr) observer_->begin(name, activity);
  }
  ObservedRange(const ObservedRange&) = delete;
  ObservedRange& operator=(const ObservedRange&) = delete;
  ~ObservedRange() {
    if (observer_ != nullptr) observer_->end();
  }

 private:
  SpanObserver* observer_;
};

/// Records one span from construction to destruction, and tells the observer; nothing when `timeline` is null, no span when it is
/// disabled. Borrows the timeline.
class SpanScope {
 public:
  SpanScope(Timeline* timeline, std::string name, Activity activity, int step = -1, Lane lane = Lane::compute);
  SpanScope(const SpanScope&) = delete;
  SpanScope& operator=(const SpanScope&) = delete;
  ~SpanScope();

 private:
  ObservedRange range_;
  Timeline* timeline_;
  Span span_;
};

}  // namespace tandem
