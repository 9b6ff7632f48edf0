#include "core/describe_memory.h"

#include "base/error.h"
#include "base/json.h"
#include "core/planner.h"
#include "format/expr.h"

namespace lapilli {

namespace {

template <class Items> const auto& item_at(const Items& items, uint32_t index, const char* what) {
  if (index >= items.size())
    fail(LAPILLI_INVALID_ARGUMENT, "There is no ", what, " ", index, ": the program has ", items.size(), ".");
  return items[index];
}

} // namespace

std::string describe_memory(const Model& model, uint32_t method_index, uint32_t plan_index,
                            std::span<const int64_t> symbols) {
  const Method& method = item_at(model.methods, method_index, "method");
  const Plan& plan = item_at(method.plans, plan_index, "plan");
  if (symbols.size() != method.symbols.size())
    fail(LAPILLI_INVALID_ARGUMENT, "Method \"", method.name, "\" has ", method.symbols.size(), " symbols, and ",
         symbols.size(), " values were given.");
  const Values values(method.exprs, symbols);
  std::vector<uint32_t> indices;
  std::vector<Lifetime> lifetimes;
  for (uint32_t i = 0; i < plan.buffers.size(); ++i)
    if (const Buffer& buffer = plan.buffers[i]; buffer.kind == BufferKind::arena) {
      const uint64_t size = values.size(buffer.size, "the size of a buffer");
      check_file(size < uint64_t{1} << 40, "The program is damaged: buffer \"", buffer.name, "\" has ", size,
                 " bytes.");
      indices.push_back(i);
      lifetimes.push_back({size, buffer.first, buffer.last});
    }
  const MemoryPlan memory = plan_memory(lifetimes, 256, uint64_t{1} << 60);
  Json json;
  json.object([&] {
    json.field("arena", memory.total);
    json.field("sum", memory.sum);
    json.field("lower_bound", memory.lower_bound);
    json.key("buffers");
    json.array([&] {
      for (size_t i = 0; i < indices.size(); ++i)
        json.object([&] {
          json.field("buffer", indices[i]);
          json.field("block", memory.places[i].block);
          json.field("offset", memory.places[i].offset);
          json.field("size", lifetimes[i].size);
        });
    });
    json.key("commands");
    json.array([&] {
      for (const Dispatch& command : plan.run)
        json.object([&] {
          json.key("groups");
          json.array([&] {
            for (const ExprIndex index : command.groups)
              json.value(values.size(index, "a number of work groups"));
          });
          json.field("flops", command.flops == 0 ? 0 : values[command.flops]);
          json.field("bytes", command.bytes == 0 ? 0 : values[command.bytes]);
        });
    });
  });
  return json.text();
}

} // namespace lapilli
