// SPDX-License-Identifier: Apache-2.0
#include "core/usable_cores.h"

#include <sched.h>

#include <thread>

#include <gtest/gtest.h>

#include "core/io/test_folder.h"

namespace tandem {
namespace {

class UsableCores : public testing::Test {
 protected:
  void write(const std::filesystem::path& file, const std::string& text) const {
    std::filesystem::create_directories((folder_.path() / file).parent_path());
    folder_.write(file.string(), text);
  }
  [[nodiscard]] int found() const { return usable_cores(folder_.path()); }

  TestFolder folder_;
  const int all_ = usable_cores(folder_.path());  // nothing is written yet
};

TEST_F(UsableCores, AreThoseOfTheProcessWhereNothingLimitsThem) {
  EXPECT_GE(all_, 1);
  write("proc/self/cgroup", "0::/user/session\n");
  write("sys/fs/cgroup/user/session/cpu.max", "max 100000\n");
  EXPECT_EQ(found(), all_);
  write("sys/fs/cgroup/user/session/cpu.max", "6400000 100000\n");
  EXPECT_EQ(found(), std::min(all_, 64));
}

TEST_F(UsableCores, OfAThreadThatIsBoundAreThoseThatItIsBoundTo) {
  const std::vector<int> cores = available_cores();
  ASSERT_FALSE(cores.empty());
  std::thread([&] {
    for (int core = 0; core <= cores.back(); ++core) {
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(static_cast<std::size_t>(core), &one);
      if (sched_setaffinity(0, sizeof one, &one) != 0) continue;  // it is not this process's
      EXPECT_EQ(available_cores(), std::vector<int>{core});
      EXPECT_EQ(found(), 1);
    }
  }).join();
  EXPECT_EQ(available_cores(), cores);
}

TEST_F(UsableCores, AreNoMoreThanTheQuotaOfTheGroupOrOfOneThatItIsIn) {
  write("proc/self/cgroup", "0::/pod/container\n");
  write("sys/fs/cgroup/pod/container/cpu.max", "max 100000\n");
  write("sys/fs/cgroup/pod/cpu.max", "150000 100000\n");
  EXPECT_EQ(found(), 1);
}

TEST_F(UsableCores, InAContainerTheGroupIsTheRoot) {
  write("proc/self/cgroup", "0::/\n");
  write("sys/fs/cgroup/cpu.max", "50000 100000\n");
  EXPECT_EQ(found(), 1) << "half a core is one";
}

TEST_F(UsableCores, OfControlGroupsOfVersionOneToo) {
  write("proc/self/cgroup", "7:cpuset:/\n4:cpu,cpuacct:/docker/a\n");
  write("sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_quota_us", "-1\n");
  write("sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(found(), all_);
  write("sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_quota_us", "100000\n");
  EXPECT_EQ(found(), 1);
}

}  // namespace
}  // namespace tandem
