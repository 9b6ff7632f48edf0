#include "format/describe.h"

#include "base/error.h"
#include "base/json.h"
#include "format/container.h"
#include "format/expr.h"

namespace lapilli {

namespace {

class Describer {
public:
  Describer(const Model& model, uint64_t longest) : model_(model), json_(longest) {}

  std::string run() {
    json_.object([&] {
      json_.field("producer", model_.producer);
      json_.field("format_version", format_version);
      json_.field("file_size", model_.file_size);
      json_.field("structure_size", model_.structure_size);
      json_.field("data_size", model_.data_size);
      json_.key("metadata");
      json_.object([&] {
        for (const auto& [key, value] : model_.metadata)
          json_.field(key, value);
      });
      json_.key("constants");
      json_.array([&] {
        for (const Constant& item : model_.constants)
          constant(item);
      });
      json_.key("states");
      json_.array([&] {
        for (const State& item : model_.states)
          state(item);
      });
      json_.list("host_operators", model_.host_operators);
      json_.key("kernels");
      json_.array([&] {
        for (const Kernel& item : model_.kernels)
          kernel(item);
      });
      json_.key("methods");
      json_.array([&] {
        for (const Method& item : model_.methods)
          method(item);
      });
    });
    return json_.text();
  }

private:
  void constant(const Constant& item) {
    json_.object([&] {
      json_.field("name", item.name);
      json_.field("dtype", name_of(item.dtype));
      json_.list("shape", item.shape);
      json_.field("offset", item.offset);
      json_.field("size", item.bytes);
    });
  }

  void state(const State& item) {
    json_.object([&] {
      json_.field("name", item.name);
      json_.field("dtype", name_of(item.dtype));
      json_.list("shape", item.shape);
      json_.field("size", item.bytes);
      json_.key("constant");
      item.constant < 0 ? json_.null() : json_.value(item.constant);
    });
  }

  void kernel(const Kernel& item) {
    json_.object([&] {
      json_.field("name", item.name);
      json_.field("format", schema::EnumNameKernelFormat(item.format));
      json_.field("bindings", item.bindings);
      json_.key("types");
      json_.array([&] {
        for (const BindingType type : item.types)
          json_.value(schema::EnumNameBindingType(type));
      });
      json_.field("push_size", item.push_size);
      json_.list("local", item.local);
      json_.field("subgroup_size", item.subgroup_size);
      json_.field("shared_size", item.shared_size);
      json_.field("code_offset", item.code_offset);
      json_.field("code_size", item.code_size);
      json_.field("spirv_version", cat(item.spirv_version >> 16, ".", item.spirv_version >> 8 & 0xff));
    });
  }

  void method(const Method& item) {
    texts_ = Texts(item.exprs, item.symbols);
    dynamic_ = symbolic(item.exprs);
    values_ = Values(item.exprs, std::vector<int64_t>(item.symbols.size()));
    json_.object([&] {
      json_.field("name", item.name);
      json_.key("symbols");
      json_.array([&] {
        for (const Symbol& found : item.symbols)
          symbol(found);
      });
      json_.key("inputs");
      json_.array([&] {
        for (const TensorSpec& spec : item.inputs)
          tensor(spec);
      });
      json_.key("outputs");
      json_.array([&] {
        for (const TensorSpec& spec : item.given_outputs())
          tensor(spec);
      });
      json_.key("checks");
      json_.array([&] {
        for (const std::string& name : item.checks)
          json_.value(name);
      });
      json_.key("integer_limit");
      json_.value(item.integer_limit);
      json_.key("plans");
      json_.array([&] {
        for (const Plan& found : item.plans)
          plan(found);
      });
    });
  }

  void symbol(const Symbol& item) {
    json_.object([&] {
      json_.field("name", item.name);
      json_.field("min", item.min);
      json_.key("max");
      item.max < 0 ? json_.null() : json_.value(item.max);
      json_.field("given", item.given);
      if (item.given)
        return;
      json_.field("input", item.input);
      json_.field("axis", item.axis);
      json_.field("factor", item.factor);
      json_.field("offset", item.offset);
    });
  }

  // A number, or the text of an expression over symbols.
  void expr(ExprIndex index) {
    if (dynamic_[index])
      return json_.value(texts_[index]);
    try {
      json_.value(values_[index]);
    } catch (const Error&) {
      json_.null();
    }
  }

  void exprs(const char* key, std::span<const ExprIndex> items) {
    json_.key(key);
    json_.array([&] {
      for (const ExprIndex item : items)
        expr(item);
    });
  }

  void expr_field(const char* key, ExprIndex index) {
    json_.key(key);
    expr(index);
  }

  void tensor(const TensorSpec& item) {
    json_.object([&] {
      json_.field("name", item.name);
      json_.field("dtype", name_of(item.dtype));
      exprs("shape", item.shape);
    });
  }

  void plan(const Plan& item) {
    json_.object([&] {
      json_.field("name", item.name);
      json_.key("requirements");
      requirements(item.requirements);
      json_.key("buffers");
      json_.array([&] {
        for (const Buffer& found : item.buffers)
          buffer(found);
      });
      commands("load", item.load);
      commands("run", item.run);
    });
  }

  void requirements(const Requirements& item) {
    json_.object([&] {
      json_.field("device", schema::EnumNameDeviceKind(item.device));
      json_.list("features", feature_names(item.features));
      json_.field("max_workgroup_invocations", item.max_workgroup_invocations);
      json_.list("max_workgroup_size", item.max_workgroup_size);
      json_.field("shared_memory", item.shared_memory);
      json_.field("subgroup_size", item.subgroup_size);
      json_.list("subgroup_operations", subgroup_names(item.subgroup_operations));
      json_.field("max_bindings", item.max_bindings);
      json_.field("max_texel_elements", item.max_texel_elements);
      json_.field("storage_range", item.storage_range);
    });
  }

  void buffer(const Buffer& item) {
    json_.object([&] {
      json_.field("name", item.name);
      json_.field("kind", name_of(item.kind));
      json_.field("index", item.index);
      expr_field("size", item.size);
      json_.field("first", item.first);
      json_.field("last", item.last);
    });
  }

  void commands(const char* key, const std::vector<Dispatch>& items) {
    json_.key(key);
    json_.array([&] {
      for (const Dispatch& item : items)
        dispatch(item);
    });
  }

  void dispatch(const Dispatch& item) {
    json_.object([&] {
      json_.field("label", item.label);
      json_.field("kernel", item.kernel);
      json_.key("bindings");
      json_.array([&] {
        for (size_t i = 0; i < item.bindings.size(); ++i)
          json_.object([&] {
            json_.field("buffer", item.bindings[i].buffer);
            expr_field("offset", item.bindings[i].offset);
            expr_field("size", item.bindings[i].size);
            json_.field("written", (item.written >> i & 1) != 0);
          });
      });
      exprs("params", item.params);
      exprs("groups", item.groups);
      json_.field("barrier", item.barrier);
      json_.field("rounds_input", item.rounds_input);
      cost("flops", item.flops);
      cost("bytes", item.bytes);
    });
  }

  // Expression 0 means that a cost is not counted.
  void cost(const char* key, ExprIndex index) {
    json_.key(key);
    index == 0 ? json_.null() : expr(index);
  }

  const Model& model_;
  Json json_;
  Texts texts_;
  std::vector<bool> dynamic_;
  Values values_;
};

} // namespace

std::string describe(const Model& model, uint64_t longest) { return Describer(model, longest).run(); }

// Of flags of an enumeration; those of a newer schema by their number.
template <class Flag, class Name>
static std::vector<std::string> flag_names(uint64_t flags, Name&& name_of_flag, const char* what) {
  std::vector<std::string> names;
  for (uint32_t bit = 0; bit < 64; ++bit)
    if ((flags >> bit & 1) != 0) {
      const char* name = name_of_flag(static_cast<Flag>(uint64_t{1} << bit));
      names.push_back(*name != '\0' ? std::string(name) : cat(what, " ", bit));
    }
  return names;
}

std::vector<std::string> feature_names(uint64_t features) {
  return flag_names<Feature>(features, schema::EnumNameFeature, "feature");
}

std::vector<std::string> subgroup_names(uint32_t operations) {
  return flag_names<schema::SubgroupOperation>(operations, schema::EnumNameSubgroupOperation, "operation");
}

} // namespace lapilli
