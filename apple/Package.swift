// swift-tools-version:5.9
// The player and its classes for Objective-C and Swift as a Swift package: in the source archive (make archive), which has what is
// generated, this file lies at the top. Vulkan is found when a program is loaded: add MoltenVK.xcframework to the application
// (docs/apple.md).
import PackageDescription

let package = Package(
    name: "Lapilli",
    platforms: [.macOS("13.3"), .iOS("16.3")],
    products: [
        .library(name: "Lapilli", targets: ["Lapilli"])
    ],
    targets: [
        .target(
            name: "LapilliPlayer",
            path: ".",
            sources: ["src"],
            publicHeadersPath: "include",
            cxxSettings: [
                .headerSearchPath("src"),
                .headerSearchPath("generated"),
                .define("LAPILLI_VERSION", to: "0.1.0"),
                .define("LAPILLI_HAS_PROFILER", to: "1"),
                .define("LAPILLI_HAS_JSON", to: "1"),
                .define("LAPILLI_HAS_STREAMS", to: "1"),
                .define("LAPILLI_HAS_WRITER", to: "1"),
                .define("LAPILLI_HAS_FIRST_RUN", to: "1"),
            ]
        ),
        .target(
            name: "Lapilli",
            dependencies: ["LapilliPlayer"],
            path: "apple",
            sources: ["LapilliModule.mm"],
            publicHeadersPath: "include"
        ),
    ],
    cxxLanguageStandard: .cxx20
)
