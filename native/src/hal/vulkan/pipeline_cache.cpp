#include "hal/vulkan/pipeline_cache.h"

#include "base/error.h"
#include "base/private_file.h"
#include "base/text.h"
#include "format/checksum.h"

#include <cstring>

namespace lapilli::vulkan {

namespace {

struct Header {
  std::array<char, 8> magic;
  uint32_t version;
  uint32_t vendor_id;
  uint32_t device_id;
  uint32_t driver_version;
  std::array<uint8_t, 16> cache_uuid;
  std::array<uint8_t, 16> driver_uuid;
  uint64_t size;
  uint64_t checksum; // XXH64 of the data, seed 0
};
static_assert(sizeof(Header) == 72);

constexpr uint32_t version = 1;
constexpr uint64_t largest = uint64_t{256} << 20; // a file that grew beyond this is begun anew
constexpr uint64_t small = uint64_t{1} << 20;     // up to here, every new pipeline is written

Header header_for(const PhysicalDevice& device, Bytes data) {
  return {{'L', 'A', 'P', 'C', 'A', 'C', 'H', 'E'},
          version,
          device.capabilities.vendor_id,
          device.capabilities.device_id,
          device.capabilities.driver_version,
          device.cache_uuid,
          device.driver_uuid,
          data.size(),
          xxh64(data.data(), data.size(), 0)};
}

std::string hex(const std::array<uint8_t, 16>& bytes) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : bytes) {
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

std::string file_in(const std::string& folder, const PhysicalDevice& device) {
  return path_in(folder, cat("pipelines-", device.capabilities.vendor_id, "-", device.capabilities.device_id, "-",
                             hex(device.cache_uuid), "-v", version, ".bin"));
}

// Empty when there is no usable file.
std::vector<std::byte> read(const std::string& file, const PhysicalDevice& device) {
  const std::vector<std::byte> bytes = read_private_file(file, largest);
  if (bytes.size() <= sizeof(Header))
    return {};
  std::vector<std::byte> data(bytes.begin() + sizeof(Header), bytes.end());
  const Header expected = header_for(device, data);
  if (std::memcmp(bytes.data(), &expected, sizeof expected) != 0)
    return {};
  return data;
}

bool write(const std::string& file, const PhysicalDevice& device, Bytes data) {
  if (data.empty() || data.size() + sizeof(Header) > largest)
    return false;
  const Header header = header_for(device, data);
  const std::array<Bytes, 2> parts{std::as_bytes(std::span(&header, 1)), data};
  return replace_private_file(file, parts);
}

} // namespace

PipelineCache::PipelineCache(const DeviceFunctions& functions, VkDevice device, const PhysicalDevice& physical,
                             const std::string& folder)
    : vk(functions), device_(device), physical_(physical) {
  std::vector<std::byte> known;
  if (!folder.empty()) {
    file_ = file_in(folder, physical);
    known = read(file_, physical);
  }
  VkPipelineCacheCreateInfo info{};
  info.sType = VK_STRUCTURE_TYPE_PIPELINE_CACHE_CREATE_INFO;
  info.initialDataSize = known.size();
  info.pInitialData = known.data();
  VkResult result = vk.CreatePipelineCache(device, &info, nullptr, &handle_);
  if (result != VK_SUCCESS && !known.empty()) { // the driver does not want what was cached
    known.clear();
    info.initialDataSize = 0;
    info.pInitialData = nullptr;
    result = vk.CreatePipelineCache(device, &info, nullptr, &handle_);
  }
  check(result, "vkCreatePipelineCache");
  size_ = known.size();
}

PipelineCache::~PipelineCache() {
  store(true);
  vk.DestroyPipelineCache(device_, handle_, nullptr);
}

void PipelineCache::store(bool all) noexcept {
  if (file_.empty())
    return;
  try {
    const std::lock_guard lock(mutex_);
    size_t size = 0;
    if (vk.GetPipelineCacheData(device_, handle_, &size, nullptr) != VK_SUCCESS || size == size_)
      return; // nothing new: some drivers do not say which pipelines they found
    if (!all && size > small && size < size_ + size_ / 16)
      return;
    std::vector<std::byte> data(size);
    if (vk.GetPipelineCacheData(device_, handle_, &size, data.data()) != VK_SUCCESS)
      return;
    if (write(file_, physical_, Bytes(data).first(size)))
      size_ = size;
  } catch (const std::exception&) { // out of memory: there is no file then
  }
}

} // namespace lapilli::vulkan
